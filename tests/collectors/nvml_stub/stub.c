/* A stand-in for libnvidia-ml.so.1 at its C interface. Everything it answers stands in a file ($NVML_STUB_STATE) that it maps: a test
 * writes there while the library is in use, in this process or in another. Structures are those of nvml.h, spelled by their sizes.
 *
 * PREFIX: what function names begin with (nvml, hgml). OLD: leave out what libraries of 2020 do not have.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef PREFIX
#define PREFIX nvml
#endif
#define GLUE2(a, b) a##b
#define GLUE(a, b) GLUE2(a, b)
#define FN(name) __attribute__((visibility("default"))) unsigned GLUE(PREFIX, name)

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
       VERSION_MISMATCH = 25, HANG = 0xFFFFFFFE };
enum { GPUS = 64, FIELDS = 320, PARTS = 8, GPM = 64 };

enum {
#define CALL(name) C_##name,
#include "calls.def"
#undef CALL
    CALLS
};

typedef struct { uint32_t code, type; uint64_t value[3]; uint32_t latency_us, made; } Record;       /* 40 bytes */
typedef struct { uint32_t gi, ci; uint64_t total, used, reserved; char uuid[64], name[64]; } Part;
typedef struct {
    char uuid[64], pci[32], name[64], serial[32], vbios[32];
    uint32_t lost, links, links_up, parts;
    Record calls[CALLS];
    Record fields[FIELDS];
    double gpm[GPM];
    Part part[PARTS];
} Gpu;
typedef struct {
    uint32_t magic, gpus;
    char driver[80];
    uint32_t event_head, event_tail;                       /* events written, events read */
    struct { uint32_t gpu, gi; uint64_t type, data; } event[64];
    Record global[CALLS];
    Gpu gpu[GPUS];
} State;

static State *state;

__attribute__((visibility("default"))) uint64_t stub_sizes(int which)
{
    uint64_t sizes[] = {sizeof(State), sizeof(Gpu), sizeof(Record), sizeof(Part), CALLS, __builtin_offsetof(State, gpu),
                        __builtin_offsetof(Gpu, calls), __builtin_offsetof(Gpu, fields), __builtin_offsetof(Gpu, gpm),
                        __builtin_offsetof(Gpu, part), __builtin_offsetof(State, global), __builtin_offsetof(State, event)};
    return sizes[which];
}

static void map_state(void)
{
    const char *path = getenv("NVML_STUB_STATE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (state)
        munmap(state, sizeof(State));
    state = file < 0 ? NULL : mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (state == MAP_FAILED)
        state = NULL;
}

static void pause_us(uint32_t us)
{
    struct timespec wait = {us / 1000000, (us % 1000000) * 1000L};
    nanosleep(&wait, NULL);
}

static unsigned answer(Record *record)
{
    __atomic_fetch_add(&record->made, 1, __ATOMIC_RELAXED);
    if (record->latency_us)
        pause_us(record->latency_us);
    while (*(volatile uint32_t *)&record->code == HANG)
        pause_us(2000);
    return record->code;
}

/* handles: GPU i is i+1; part j of it has (j+1) in the upper half */
static Gpu *gpu_of(void *handle)
{
    uintptr_t number = (uintptr_t)handle & 0xFFFF;
    return state && number >= 1 && number <= state->gpus ? &state->gpu[number - 1] : NULL;
}
static Part *part_of(void *handle)
{
    Gpu *gpu = gpu_of(handle);
    uintptr_t number = (uintptr_t)handle >> 16;
    return gpu && number >= 1 && number <= gpu->parts ? &gpu->part[number - 1] : NULL;
}

#define GLOBAL(name) Record *r = &state->global[C_##name]; unsigned code = answer(r); if (code) return code
#define OF_GPU(name) Gpu *gpu = gpu_of(h); if (!gpu) return INVALID_ARGUMENT; if (gpu->lost) return 15; \
    Record *r = &gpu->calls[C_##name]; unsigned code = answer(r); if (code) return code

FN(Init_v2)(void) { if (!state) map_state(); if (!state) return 9; GLOBAL(Init_v2); return SUCCESS; }
FN(Shutdown)(void) { if (state) answer(&state->global[C_Shutdown]); return SUCCESS; }
FN(SystemGetDriverVersion)(char *to, unsigned size) { GLOBAL(SystemGetDriverVersion); snprintf(to, size, "%s", state->driver); return SUCCESS; }
FN(DeviceGetCount_v2)(unsigned *count) { GLOBAL(DeviceGetCount_v2); *count = state->gpus; return SUCCESS; }
FN(DeviceGetHandleByIndex_v2)(unsigned index, void **h)
{
    GLOBAL(DeviceGetHandleByIndex_v2);
    if (index >= state->gpus)
        return INVALID_ARGUMENT;
    *h = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}
#define TEXT(name, field) FN(name)(void *h, char *to, unsigned size) { OF_GPU(name); snprintf(to, size, "%s", gpu->field); return SUCCESS; }
FN(DeviceGetUUID)(void *h, char *to, unsigned size) { OF_GPU(DeviceGetUUID); Part *p = part_of(h); snprintf(to, size, "%s", p ? p->uuid : gpu->uuid); return SUCCESS; }
FN(DeviceGetName)(void *h, char *to, unsigned size) { OF_GPU(DeviceGetName); Part *p = part_of(h); snprintf(to, size, "%s", p ? p->name : gpu->name); return SUCCESS; }
TEXT(DeviceGetSerial, serial)
TEXT(DeviceGetVbiosVersion, vbios)
FN(DeviceGetPciInfo_v3)(void *h, char *to) { OF_GPU(DeviceGetPciInfo_v3); memset(to, 0, 68); snprintf(to + 36, 32, "%s", gpu->pci); return SUCCESS; }

#define U32(name) FN(name)(void *h, unsigned *to) { OF_GPU(name); *to = (unsigned)r->value[0]; return SUCCESS; }
U32(DeviceGetVirtualizationMode)
U32(DeviceGetPowerUsage)
U32(DeviceGetCurrPcieLinkGeneration)
U32(DeviceGetCurrPcieLinkWidth)
U32(DeviceGetMaxPcieLinkGeneration)
U32(DeviceGetMaxPcieLinkWidth)
FN(DeviceGetClockInfo)(void *h, unsigned type, unsigned *to) { OF_GPU(DeviceGetClockInfo); *to = (unsigned)r->value[type == 2]; return SUCCESS; }
FN(DeviceGetTemperature)(void *h, unsigned sensor, unsigned *to) { OF_GPU(DeviceGetTemperature); *to = (unsigned)r->value[sensor != 0]; return SUCCESS; }
FN(DeviceGetTemperatureThreshold)(void *h, unsigned kind, unsigned *to)
{
    OF_GPU(DeviceGetTemperatureThreshold);
    *to = (unsigned)r->value[kind == 3 ? 2 : kind];        /* shutdown, slowdown, GPU max */
    return SUCCESS;
}
FN(DeviceGetUtilizationRates)(void *h, unsigned *to) { OF_GPU(DeviceGetUtilizationRates); to[0] = (unsigned)r->value[0]; to[1] = (unsigned)r->value[1]; return SUCCESS; }
FN(DeviceGetCurrentClocksThrottleReasons)(void *h, uint64_t *to) { OF_GPU(DeviceGetCurrentClocksThrottleReasons); *to = r->value[0]; return SUCCESS; }
FN(DeviceGetMemoryInfo)(void *h, uint64_t *to)
{
    OF_GPU(DeviceGetMemoryInfo);
    to[0] = r->value[0], to[2] = r->value[1] + r->value[2], to[1] = to[0] - to[2];   /* version 1 counts the reserve as used */
    return SUCCESS;
}
FN(DeviceGetPcieThroughput)(void *h, unsigned counter, unsigned *to) { (void)counter; OF_GPU(DeviceGetPcieThroughput); pause_us(20000); *to = 1; return SUCCESS; }
#define PROCESSES(name) FN(name)(void *h, unsigned *count, void *to) \
    { OF_GPU(name); unsigned room = *count; *count = (unsigned)r->value[0]; return to && room >= *count ? SUCCESS : *count ? INSUFFICIENT_SIZE : SUCCESS; }
PROCESSES(DeviceGetComputeRunningProcesses)
FN(DeviceGetMigMode)(void *h, unsigned *now, unsigned *pending) { OF_GPU(DeviceGetMigMode); *now = *pending = (unsigned)r->value[0]; return SUCCESS; }
FN(DeviceGetNvLinkState)(void *h, unsigned link, unsigned *to)
{
    OF_GPU(DeviceGetNvLinkState);
    if (link >= gpu->links)
        return NOT_SUPPORTED;
    *to = link < gpu->links_up;
    return SUCCESS;
}
FN(DeviceGetRemappedRows)(void *h, unsigned *a, unsigned *b, unsigned *c, unsigned *d)
{
    OF_GPU(DeviceGetRemappedRows);
    *a = (unsigned)r->value[0], *b = (unsigned)r->value[1], *c = (unsigned)r->value[2] & 1, *d = (unsigned)r->value[2] >> 1;
    return SUCCESS;
}

#ifndef OLD
typedef struct { uint32_t field, scope; int64_t timestamp, latency; uint32_t type, code; uint64_t value; } FieldValue;
FN(DeviceGetFieldValues)(void *h, int count, FieldValue *to)
{
    OF_GPU(DeviceGetFieldValues);
    for (int i = 0; i < count; i++) {
        Record *f = to[i].field < FIELDS ? &gpu->fields[to[i].field] : NULL;
        if (f && f->code == 1000)
            continue;                                       /* a library that does not fill in what it does not know */
        to[i].code = f ? answer(f) : INVALID_ARGUMENT;
        if (f && f->code == SUCCESS)
            to[i].type = f->type, to[i].value = f->value[0], to[i].latency = f->value[1];
    }
    return SUCCESS;
}
FN(DeviceGetCurrentClocksEventReasons)(void *h, uint64_t *to) { OF_GPU(DeviceGetCurrentClocksEventReasons); *to = r->value[0]; return SUCCESS; }
FN(DeviceGetTemperatureV)(void *h, int *to) { OF_GPU(DeviceGetTemperatureV); if (to[0] != 0x100000C) return VERSION_MISMATCH; to[2] = (int)r->value[0]; return SUCCESS; }
FN(DeviceGetMarginTemperature)(void *h, int *to) { OF_GPU(DeviceGetMarginTemperature); if (to[0] != 0x1000008) return VERSION_MISMATCH; to[1] = (int)r->value[0]; return SUCCESS; }
FN(DeviceGetMemoryInfo_v2)(void *h, uint64_t *to)
{
    Part *part = part_of(h);
    OF_GPU(DeviceGetMemoryInfo_v2);
    if (*(uint32_t *)to != 0x02000028)
        return VERSION_MISMATCH;
    to[1] = part ? part->total : r->value[0], to[2] = part ? part->reserved : r->value[2], to[4] = part ? part->used : r->value[1];
    to[3] = to[1] - to[2] - to[4];
    return SUCCESS;
}
PROCESSES(DeviceGetComputeRunningProcesses_v2)
PROCESSES(DeviceGetComputeRunningProcesses_v3)
FN(DeviceGetSramEccErrorStatus)(void *h, char *to)
{
    OF_GPU(DeviceGetSramEccErrorStatus);
    if (*(uint32_t *)to != 0x1000068)
        return VERSION_MISMATCH;
    *(uint32_t *)(to + 96) = (uint32_t)r->value[0];
    return SUCCESS;
}
FN(DeviceGetGpuFabricInfoV)(void *h, char *to)
{
    OF_GPU(DeviceGetGpuFabricInfoV);
    uint32_t version = *(uint32_t *)to;
    if (version >> 24 > r->type || (version != 0x3000028 && version != 0x2000024))
        return VERSION_MISMATCH;                            /* type: the newest structure that this library knows */
    *(uint32_t *)(to + 20) = (uint32_t)r->value[1], to[28] = (char)r->value[0], *(uint32_t *)(to + 32) = (uint32_t)r->value[2];
    return SUCCESS;
}
FN(DeviceGetMaxMigDeviceCount)(void *h, unsigned *to) { OF_GPU(DeviceGetMaxMigDeviceCount); *to = PARTS - 1; return SUCCESS; }
FN(DeviceGetMigDeviceHandleByIndex)(void *h, unsigned index, void **to)
{
    OF_GPU(DeviceGetMigDeviceHandleByIndex);
    if (index >= gpu->parts)
        return NOT_FOUND;
    *to = (void *)(((uintptr_t)(index + 1) << 16) | (uintptr_t)h);
    return SUCCESS;
}
FN(DeviceGetGpuInstanceId)(void *h, unsigned *to) { OF_GPU(DeviceGetGpuInstanceId); Part *p = part_of(h); if (!p) return INVALID_ARGUMENT; *to = p->gi; return SUCCESS; }
FN(DeviceGetComputeInstanceId)(void *h, unsigned *to) { OF_GPU(DeviceGetComputeInstanceId); Part *p = part_of(h); if (!p) return INVALID_ARGUMENT; *to = p->ci; return SUCCESS; }
FN(GpmQueryDeviceSupport)(void *h, unsigned *to) { OF_GPU(GpmQueryDeviceSupport); to[1] = (unsigned)r->value[0]; return SUCCESS; }
typedef struct { void *device; uint32_t instance, serial; } Sample;
FN(GpmSampleAlloc)(void **to) { GLOBAL(GpmSampleAlloc); *to = calloc(1, sizeof(Sample)); return SUCCESS; }
FN(GpmSampleFree)(void *sample) { answer(&state->global[C_GpmSampleFree]); free(sample); return SUCCESS; }
static uint32_t serial;
FN(GpmSampleGet)(void *h, Sample *to) { OF_GPU(GpmSampleGet); *to = (Sample){h, 0xFFFFFFFF, ++serial}; return SUCCESS; }
FN(GpmMigSampleGet)(void *h, unsigned gi, Sample *to) { OF_GPU(GpmMigSampleGet); *to = (Sample){h, gi, ++serial}; return SUCCESS; }
typedef struct { uint32_t version, count; Sample *older, *newer; struct { uint32_t id, code; double value; char *info[3]; } metric[]; } Metrics;
FN(GpmMetricsGet)(Metrics *m)
{
    GLOBAL(GpmMetricsGet);
    if (m->version != 1 || !m->older || m->older->device != m->newer->device || m->older->serial >= m->newer->serial)
        return INVALID_ARGUMENT;
    Gpu *gpu = gpu_of(m->older->device);
    for (uint32_t i = 0; i < m->count; i++) {
        m->metric[i].code = m->metric[i].id < GPM ? SUCCESS : NOT_SUPPORTED;
        m->metric[i].value = m->metric[i].id < GPM ? gpu->gpm[m->metric[i].id] : 0;
    }
    return SUCCESS;
}
FN(EventSetWait_v2)(void *set, char *to, unsigned wait_ms)
{
    (void)set;
    GLOBAL(EventSetWait_v2);
    for (unsigned waited = 0; waited < wait_ms; waited += 5) {
        if (state->event_tail != *(volatile uint32_t *)&state->event_head) {
            uint32_t at = state->event_tail++ % 64;
            *(void **)to = (void *)(uintptr_t)(state->event[at].gpu + 1);
            *(uint64_t *)(to + 8) = state->event[at].type, *(uint64_t *)(to + 16) = state->event[at].data;
            *(uint32_t *)(to + 24) = state->event[at].gi, *(uint32_t *)(to + 28) = 0xFFFFFFFF;
            return SUCCESS;
        }
        pause_us(wait_ms > 1000 ? 250000 : 5000);              /* seldom: the real one sleeps in the kernel and costs nothing */
        waited += wait_ms > 1000 ? 245 : 0;
    }
    return TIMEOUT;
}
#endif
FN(DeviceGetGpuFabricInfo)(void *h, char *to) { OF_GPU(DeviceGetGpuFabricInfo); *(uint32_t *)(to + 16) = (uint32_t)r->value[1]; to[24] = (char)r->value[0]; return SUCCESS; }
FN(EventSetCreate)(void **to) { GLOBAL(EventSetCreate); *to = (void *)1; return SUCCESS; }
FN(EventSetFree)(void *set) { (void)set; answer(&state->global[C_EventSetFree]); return SUCCESS; }
FN(DeviceGetSupportedEventTypes)(void *h, uint64_t *to) { OF_GPU(DeviceGetSupportedEventTypes); *to = r->value[0]; return SUCCESS; }
FN(DeviceRegisterEvents)(void *h, uint64_t types, void *set) { (void)types, (void)set; OF_GPU(DeviceRegisterEvents); return SUCCESS; }
