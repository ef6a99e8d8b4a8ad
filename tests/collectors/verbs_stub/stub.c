/* A stand-in for libibverbs.so.1 at its C interface: adapters with unreliable-datagram queue pairs that reach each other, within a process
 * and between processes. What there is and what it answers stands in a file ($VERBS_STUB_STATE) that it maps: a test writes there while the
 * library is in use. A queue pair is a Unix datagram socket <file>.<number>; a thread of it does what an adapter does on arrival.
 *
 * Strict where a mistake would pass unseen: the steps of a queue pair and their masks, keys of memory, the Q_Key, datagrams without a posted
 * receive (dropped), completion events that come only when asked for, queues that overrun.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { DEVICES = 16, HANG = 0xFFFFFFFE, DEPTH = 256, GRH = 40, LONGEST = 4096 };
enum {
#define CALL(name) C_##name,
#include "calls.def"
#undef CALL
    CALLS
};

/* --- the interface, as verbs.h has it: layout.def is compared with rdma-core's own numbers --- */

enum { IBV_QPT_UD = 4, IBV_WR_SEND = 2, IBV_SEND_SIGNALED = 2, IBV_ACCESS_LOCAL_WRITE = 1, IBV_PORT_ACTIVE = 4,
       IBV_LINK_LAYER_UNSPECIFIED = 0, IBV_LINK_LAYER_INFINIBAND = 1, IBV_LINK_LAYER_ETHERNET = 2, IBV_WC_SUCCESS = 0, IBV_WC_RECV = 128,
       IBV_WC_GRH = 1, IBV_QPS_INIT = 1, IBV_QPS_RTR = 2, IBV_QPS_RTS = 3, IBV_QP_STATE = 1, IBV_QP_PKEY_INDEX = 16, IBV_QP_PORT = 32,
       IBV_QP_QKEY = 64, IBV_QP_SQ_PSN = 65536 };
enum { WC_LOCAL_LENGTH = 1, WC_LOCAL_PROTECTION = 4 };

union ibv_gid { uint8_t raw[16]; uint64_t words[2]; };
struct ibv_sge { uint64_t addr; uint32_t length, lkey; };
struct ibv_recv_wr { uint64_t wr_id; struct ibv_recv_wr *next; struct ibv_sge *sg_list; int num_sge; };
struct ibv_ah;
struct ibv_send_wr {
    uint64_t wr_id; struct ibv_send_wr *next; struct ibv_sge *sg_list; int num_sge; unsigned opcode, send_flags; uint32_t imm_data;
    union { struct { uint64_t a, b, c; uint32_t rkey; } atomic; struct { struct ibv_ah *ah; uint32_t remote_qpn, remote_qkey; } ud; } wr;
    uint32_t remote_srqn;
    uint64_t bind[6];
};
struct ibv_wc {
    uint64_t wr_id; unsigned status, opcode; uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp; unsigned wc_flags;
    uint16_t pkey_index, slid; uint8_t sl, dlid_path_bits;
};
struct ibv_grh { uint32_t version_tclass_flow; uint16_t paylen; uint8_t next_hdr, hop_limit; union { uint8_t raw[16]; } sgid, dgid; };
struct ibv_global_route { union ibv_gid dgid; uint32_t flow_label; uint8_t sgid_index, hop_limit, traffic_class; };
struct ibv_ah_attr {
    struct ibv_global_route grh; uint16_t dlid; uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};
struct ibv_qp_cap { uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data; };
struct ibv_cq;
struct ibv_qp;
struct ibv_qp_init_attr {
    void *qp_context; struct ibv_cq *send_cq, *recv_cq; void *srq; struct ibv_qp_cap cap; unsigned qp_type; int sq_sig_all;
};
struct ibv_qp_attr {
    unsigned qp_state, cur_qp_state, path_mtu, path_mig_state; uint32_t qkey, rq_psn, sq_psn, dest_qp_num; unsigned qp_access_flags;
    struct ibv_qp_cap cap; struct ibv_ah_attr ah_attr, alt_ah_attr; uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
        alt_port_num, alt_timeout;
    uint32_t rate_limit;
};
struct ibv_port_attr {
    unsigned state, max_mtu, active_mtu; int gid_tbl_len; uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid; uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed,
        phys_state, link_layer, flags; uint16_t port_cap_flags2;
};
struct ibv_context_ops {
    void *before[11];
    int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
    int (*req_notify_cq)(struct ibv_cq *, int);
    void *between[12];
    int (*post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
    int (*post_recv)(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
    void *after[5];
};
typedef struct { char name[64]; uint32_t link_layer, state, lid, gid_index; uint8_t gid[16]; uint32_t drops, delay_us; } Device;
struct ibv_context { Device *device; struct ibv_context_ops ops; int cmd_fd; };
struct ibv_pd { struct ibv_context *context; uint32_t handle; };
struct ibv_mr { struct ibv_context *context; struct ibv_pd *pd; void *addr; size_t length; uint32_t handle, lkey, rkey; };
struct ibv_comp_channel { struct ibv_context *context; int fd, refcnt; struct ibv_cq *cq; };
struct ibv_cq {
    struct ibv_context *context; struct ibv_comp_channel *channel; void *cq_context; pthread_mutex_t lock; int room, armed;
    unsigned head, tail; struct ibv_wc ring[DEPTH];
};
struct ibv_qp {
    struct ibv_context *context; void *qp_context; struct ibv_pd *pd; struct ibv_cq *send_cq, *recv_cq; void *srq; uint32_t handle, qp_num;
    unsigned state; uint32_t qkey; int socket, room; pthread_t thread; pthread_mutex_t lock; unsigned head, tail;
    struct { uint64_t wr_id; struct ibv_sge at; } posted[DEPTH];
};
struct ibv_ah { struct ibv_context *context; struct ibv_pd *pd; struct ibv_ah_attr to; };

/* --- the file --- */

typedef struct { uint32_t code, made; } Record;
typedef struct { uint32_t devices, next_qpn, next_lkey, unused; Device device[DEVICES]; Record call[CALLS][DEVICES]; } State;
typedef struct { uint32_t qkey, src_qp; uint16_t slid, dlid; uint8_t is_global, sl, sgid[16], dgid[16]; uint32_t length; char payload[LONGEST]; } Packet;

static State *state;
static char state_path[80];
static struct ibv_mr *regions[DEPTH];
static unsigned region_count;
static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT uint64_t stub_sizes(int which)
{
    uint64_t sizes[] = {sizeof(State), sizeof(Device), offsetof(State, device), offsetof(State, call), CALLS};
    return sizes[which];
}

EXPORT const char *stub_layout(void)
{
    static char text[8192];
    char *at = text;
#define SIZE(s) at += sprintf(at, #s " %zu\n", sizeof(struct s));
#define AT(s, f) at += sprintf(at, #s "." #f " %zu\n", offsetof(struct s, f));
#define VALUE(v) at += sprintf(at, #v " %d\n", (int)(v));
#include "layout.def"
    return text;
}

static void pause_us(uint32_t us)
{
    struct timespec wait = {us / 1000000, (us % 1000000) * 1000L};
    nanosleep(&wait, NULL);
}

static int answer(Device *device, int call)
{
    Record *record = &state->call[call][device ? device - state->device : 0];
    __atomic_fetch_add(&record->made, 1, __ATOMIC_RELAXED);
    while (*(volatile uint32_t *)&record->code == HANG)
        pause_us(2000);
    errno = (int)record->code;
    return (int)record->code;
}

static int map_state(void)
{
    const char *path = getenv("VERBS_STUB_STATE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return 0;
    State *mapped = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    snprintf(state_path, sizeof(state_path), "%s", path);
    state = mapped == MAP_FAILED ? NULL : mapped;
    return state != NULL;
}

/* --- devices --- */

EXPORT Device **ibv_get_device_list(int *count)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    int there = state || map_state();
    pthread_mutex_unlock(&lock);
    if (!there || answer(NULL, C_get_device_list)) {
        errno = errno ? errno : ENOSYS;
        return NULL;
    }
    Device **list = calloc(DEVICES + 1, sizeof(*list));
    for (uint32_t i = 0; i < state->devices; i++)
        list[i] = &state->device[i];
    *count = (int)state->devices;
    return list;
}
EXPORT void ibv_free_device_list(Device **list) { free(list); }
EXPORT const char *ibv_get_device_name(Device *device) { return device->name; }

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *to)
{
    if (answer(cq->context->device, C_poll_cq))
        return -1;
    int found = 0;
    pthread_mutex_lock(&cq->lock);
    while (found < most && cq->head != cq->tail)
        to[found++] = cq->ring[cq->head++ % DEPTH];
    pthread_mutex_unlock(&cq->lock);
    return found;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited)
{
    (void)solicited;
    int code = answer(cq->context->device, C_req_notify_cq);
    if (code)
        return code;
    pthread_mutex_lock(&cq->lock);
    cq->armed = 1;
    pthread_mutex_unlock(&cq->lock);
    return 0;
}

static void complete(struct ibv_cq *cq, struct ibv_wc wc)
{
    pthread_mutex_lock(&cq->lock);
    if (cq->tail - cq->head >= (unsigned)cq->room) {
        fprintf(stderr, "verbs stub: a completion queue overran\n");
        abort();
    }
    cq->ring[cq->tail++ % DEPTH] = wc;
    if (cq->armed && cq->channel) {
        uint64_t one = 1;
        cq->armed = 0;
        if (write(cq->channel->fd, &one, sizeof(one)) < 0)
            perror("verbs stub: event");
    }
    pthread_mutex_unlock(&cq->lock);
}

static char *memory(struct ibv_sge *at)
{
    char *found = NULL;
    pthread_mutex_lock(&regions_lock);
    for (unsigned i = 0; i < region_count; i++) {
        struct ibv_mr *mr = regions[i];
        uint64_t begin = (uint64_t)(uintptr_t)mr->addr;
        if (mr->lkey == at->lkey && at->addr >= begin && at->addr + at->length <= begin + mr->length)
            found = (char *)(uintptr_t)at->addr;
    }
    pthread_mutex_unlock(&regions_lock);
    return found;
}

static void name_of(uint32_t qpn, struct sockaddr_un *to)
{
    memset(to, 0, sizeof(*to));
    to->sun_family = AF_UNIX;
    snprintf(to->sun_path, sizeof(to->sun_path), "%s.%x", state_path, qpn);
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    Device *device = qp->context->device;
    int code = answer(device, C_post_send);
    *bad = wr;
    if (code)
        return code;
    if (qp->state != IBV_QPS_RTS || wr->opcode != IBV_WR_SEND || wr->num_sge != 1 || wr->next || !wr->wr.ud.ah)
        return EINVAL;
    struct ibv_wc wc = {.wr_id = wr->wr_id, .qp_num = qp->qp_num};
    char *from = memory(wr->sg_list);
    if (!from || wr->sg_list->length > LONGEST) {
        wc.status = from ? WC_LOCAL_LENGTH : WC_LOCAL_PROTECTION;
        complete(qp->send_cq, wc);
        return 0;
    }
    struct ibv_ah_attr *to = &wr->wr.ud.ah->to;
    Packet packet = {.qkey = wr->wr.ud.remote_qkey, .src_qp = qp->qp_num, .slid = (uint16_t)device->lid, .dlid = to->dlid,
                     .is_global = to->is_global, .sl = to->sl, .length = wr->sg_list->length};
    memcpy(packet.sgid, device->gid, 16);
    memcpy(packet.dgid, to->grh.dgid.raw, 16);
    memcpy(packet.payload, from, wr->sg_list->length);
    struct sockaddr_un there;
    name_of(wr->wr.ud.remote_qpn, &there);
    if (!device->drops)  /* nobody there: lost, as on a wire */
        sendto(qp->socket, &packet, offsetof(Packet, payload) + packet.length, 0, (struct sockaddr *)&there, sizeof(there));
    if (wr->send_flags & IBV_SEND_SIGNALED)
        complete(qp->send_cq, wc);
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    int code = answer(qp->context->device, C_post_recv);
    *bad = wr;
    if (code)
        return code;
    pthread_mutex_lock(&qp->lock);
    int full = qp->tail - qp->head >= (unsigned)qp->room;
    if (!full && qp->state >= IBV_QPS_INIT) {
        qp->posted[qp->tail % DEPTH].wr_id = wr->wr_id;
        qp->posted[qp->tail++ % DEPTH].at = *wr->sg_list;
    }
    pthread_mutex_unlock(&qp->lock);
    return full ? ENOMEM : qp->state < IBV_QPS_INIT || wr->num_sge != 1 || wr->next ? EINVAL : 0;
}

static void deliver(struct ibv_qp *qp, Packet *packet)
{
    Device *device = qp->context->device;
    int mine = packet->is_global ? !memcmp(packet->dgid, device->gid, 16) : packet->dlid == device->lid;
    if (!mine || packet->qkey != qp->qkey || qp->state < IBV_QPS_RTR || device->state != IBV_PORT_ACTIVE || device->drops)
        return;
    pthread_mutex_lock(&qp->lock);
    int posted = qp->head != qp->tail;
    unsigned slot = posted ? qp->head++ % DEPTH : 0;
    pthread_mutex_unlock(&qp->lock);
    if (!posted)
        return;
    struct ibv_wc wc = {.wr_id = qp->posted[slot].wr_id, .opcode = IBV_WC_RECV, .byte_len = GRH + packet->length, .qp_num = qp->qp_num,
                        .src_qp = packet->src_qp, .slid = packet->slid, .sl = packet->sl, .wc_flags = packet->is_global ? IBV_WC_GRH : 0};
    char *to = memory(&qp->posted[slot].at);
    if (!to)
        wc.status = WC_LOCAL_PROTECTION;
    else if (wc.byte_len > qp->posted[slot].at.length)
        wc.status = WC_LOCAL_LENGTH;
    else {
        struct ibv_grh *header = (struct ibv_grh *)to;
        memset(to, 0xAA, GRH);  /* without such a header these octets are undefined */
        if (packet->is_global) {
            memset(to, 0, GRH);
            to[0] = 0x60;
            memcpy(header->sgid.raw, packet->sgid, 16);
            memcpy(header->dgid.raw, packet->dgid, 16);
        }
        memcpy(to + GRH, packet->payload, packet->length);
    }
    complete(qp->recv_cq, wc);
}

static void *listen_on(void *argument)
{
    struct ibv_qp *qp = argument;
    Packet packet;
    ssize_t size;
    while ((size = recv(qp->socket, &packet, sizeof(packet), 0)) > 0) {
        if (qp->context->device->delay_us)
            pause_us(qp->context->device->delay_us);
        if (size >= (ssize_t)offsetof(Packet, payload))
            deliver(qp, &packet);
    }
    return NULL;
}

EXPORT struct ibv_context *ibv_open_device(Device *device)
{
    if (answer(device, C_open_device))
        return NULL;
    struct ibv_context *context = calloc(1, sizeof(*context));
    context->device = device;
    context->ops.poll_cq = poll_cq, context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send, context->ops.post_recv = post_recv;
    return context;
}
EXPORT int ibv_close_device(struct ibv_context *context) { answer(context->device, C_close_device); free(context); return 0; }
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *to)
{
    Device *device = context->device;
    int code = answer(device, C_query_port);
    if (code || number != 1)
        return code ? code : EINVAL;
    memset(to, 0, sizeof(*to));
    to->state = device->state, to->lid = (uint16_t)device->lid, to->link_layer = (uint8_t)device->link_layer, to->gid_tbl_len = 8;
    return 0;
}
EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t number, int index, union ibv_gid *to)
{
    if (answer(context->device, C_query_gid))
        return -1;
    if (number != 1 || index != (int)context->device->gid_index) {
        errno = ENODATA;
        return -1;
    }
    memcpy(to->raw, context->device->gid, 16);
    return 0;
}

/* --- what is made --- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    if (answer(context->device, C_alloc_pd))
        return NULL;
    struct ibv_pd *pd = calloc(1, sizeof(*pd));
    pd->context = context;
    return pd;
}
EXPORT int ibv_dealloc_pd(struct ibv_pd *pd) { free(pd); return 0; }
EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    if (answer(pd->context->device, C_reg_mr) || access != IBV_ACCESS_LOCAL_WRITE)
        return NULL;
    struct ibv_mr *mr = calloc(1, sizeof(*mr));
    mr->context = pd->context, mr->pd = pd, mr->addr = addr, mr->length = length;
    mr->lkey = 0x1000 + __atomic_fetch_add(&state->next_lkey, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&regions_lock);
    regions[region_count++ % DEPTH] = mr;
    pthread_mutex_unlock(&regions_lock);
    return mr;
}
EXPORT int ibv_dereg_mr(struct ibv_mr *mr)
{
    pthread_mutex_lock(&regions_lock);
    for (unsigned i = 0; i < region_count; i++)
        if (regions[i] == mr)
            regions[i] = regions[--region_count];
    pthread_mutex_unlock(&regions_lock);
    free(mr);
    return 0;
}
EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    if (answer(context->device, C_create_comp_channel))
        return NULL;
    struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));
    channel->context = context, channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    return channel;
}
EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) { close(channel->fd); free(channel); return 0; }
EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *about, struct ibv_comp_channel *channel, int vector)
{
    if (answer(context->device, C_create_cq) || cqe < 1 || cqe > DEPTH || vector)
        return NULL;
    struct ibv_cq *cq = calloc(1, sizeof(*cq));
    cq->context = context, cq->channel = channel, cq->cq_context = about, cq->room = cqe;
    pthread_mutex_init(&cq->lock, NULL);
    if (channel)
        channel->cq = cq;
    return cq;
}
EXPORT int ibv_destroy_cq(struct ibv_cq *cq) { free(cq); return 0; }
EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **about)
{
    uint64_t one;
    if (read(channel->fd, &one, sizeof(one)) != sizeof(one))
        return -1;
    *cq = channel->cq, *about = channel->cq->cq_context;
    return 0;
}
EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned events) { (void)cq, (void)events; }

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    if (answer(pd->context->device, C_create_qp))
        return NULL;
    if (init->qp_type != IBV_QPT_UD || !init->send_cq || !init->recv_cq || init->cap.max_recv_wr > DEPTH || init->cap.max_recv_sge != 1) {
        errno = EINVAL;
        return NULL;
    }
    struct ibv_qp *qp = calloc(1, sizeof(*qp));
    struct sockaddr_un here;
    qp->context = pd->context, qp->pd = pd, qp->send_cq = init->send_cq, qp->recv_cq = init->recv_cq, qp->room = (int)init->cap.max_recv_wr;
    qp->qp_num = 0x100 + __atomic_fetch_add(&state->next_qpn, 1, __ATOMIC_RELAXED);
    pthread_mutex_init(&qp->lock, NULL);
    qp->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    name_of(qp->qp_num, &here);
    if (qp->socket < 0 || bind(qp->socket, (struct sockaddr *)&here, sizeof(here)) || pthread_create(&qp->thread, NULL, listen_on, qp)) {
        free(qp);
        return NULL;
    }
    return qp;
}
EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
    struct sockaddr_un here;
    name_of(qp->qp_num, &here);
    unlink(here.sun_path);
    shutdown(qp->socket, SHUT_RDWR);
    pthread_join(qp->thread, NULL);
    close(qp->socket);
    free(qp);
    return 0;
}
EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *to, int mask)
{
    static const int needed[] = {0, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, IBV_QP_STATE, IBV_QP_STATE | IBV_QP_SQ_PSN};
    int code = answer(qp->context->device, C_modify_qp);
    if (code)
        return code;
    if (to->qp_state < IBV_QPS_INIT || to->qp_state > IBV_QPS_RTS || to->qp_state != qp->state + 1 || mask != needed[to->qp_state])
        return EINVAL;
    if (to->qp_state == IBV_QPS_INIT && (to->port_num != 1 || to->pkey_index))
        return EINVAL;
    if (mask & IBV_QP_QKEY)
        qp->qkey = to->qkey;
    qp->state = to->qp_state;
    return 0;
}

static struct ibv_ah *handle(struct ibv_pd *pd, struct ibv_ah_attr *to)
{
    if (to->port_num != 1 || (pd->context->device->link_layer == IBV_LINK_LAYER_ETHERNET && !to->is_global)
        || (to->is_global && to->grh.sgid_index != pd->context->device->gid_index)) {
        errno = EINVAL;
        return NULL;
    }
    struct ibv_ah *ah = calloc(1, sizeof(*ah));
    ah->context = pd->context, ah->pd = pd, ah->to = *to;
    return ah;
}
EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *to)
{
    return answer(pd->context->device, C_create_ah) ? NULL : handle(pd, to);
}
EXPORT struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *header, uint8_t number)
{
    if (answer(pd->context->device, C_create_ah_from_wc))
        return NULL;
    struct ibv_ah_attr to = {.dlid = wc->slid, .sl = wc->sl, .port_num = number};
    if (wc->wc_flags & IBV_WC_GRH) {
        to.is_global = 1, to.grh.sgid_index = (uint8_t)pd->context->device->gid_index, to.grh.hop_limit = 0xFF;
        memcpy(to.grh.dgid.raw, header->sgid.raw, 16);
    }
    return handle(pd, &to);
}
EXPORT int ibv_destroy_ah(struct ibv_ah *ah) { free(ah); return 0; }
