"""Threads that copy memory without the interpreter: around the caches, and at idle priority where training goes on.

A copy beside a training step must not take a core from it. A Python thread of idle priority could: it may be
put aside while it holds the interpreter's lock. So the work is C, compiled once per node into the run directory; where
there is no compiler, `copying` does without. Stores go around the caches, four pages at a time: the C library does so
only from sizes on that a tensor seldom has.
"""

from __future__ import annotations

import array
import ctypes
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Sequence
from itertools import chain

from trainwarden_hook.native import NotBuilt, build

log = logging.getLogger("trainwarden.checkpoint")
PART_BYTES = 1 << 18
"""What one thread takes at a time: so much may be left to the slowest when all others are done."""
MAX_THREADS = 4
FLAGS = ("-pthread", "-O3")
BLOCK_BYTES, SUMS = 1 << 20, 128 + 1024
"""As in `sums`: a block is a matrix of words, and has a sum of every row and column."""
SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define PAGE 4096
#define MAX_EXTRA 16
#define ROWS 128
#define COLUMNS 1024
#define BLOCK (8ul * ROWS * COLUMNS)
struct whole { uint64_t to, from, size; };
/* block: its number when the part is one whole block of the payload, -1 when it is less */
struct part { uint64_t to, from, size; int64_t block; };
/* sums: those of columns and rows of every block of the payload that lies at `at`; known: whose they are there */
struct payload { uint64_t at; uint64_t *sums; unsigned char *known; };
struct work { atomic_long next; atomic_int id; long count; int started; pthread_t idle; struct payload payload; struct part parts[]; };

static inline __attribute__((always_inline)) void add(uint64_t *sums, const uint64_t *words) {
  memset(sums, 0, COLUMNS * sizeof *sums);
  for (int row = 0; row < ROWS; row += 4, words += 4 * COLUMNS) {
    uint64_t all[4] = {0};
    for (int at = 0; at < COLUMNS; at++) {
      uint64_t a = words[at], b = words[at + COLUMNS], c = words[at + 2 * COLUMNS], d = words[at + 3 * COLUMNS];
      sums[at] += a + b + c + d;
      all[0] += a, all[1] += b, all[2] += c, all[3] += d;
    }
    memcpy(sums + COLUMNS + row, all, sizeof all);
  }
}
static void add_anywhere(uint64_t *sums, const uint64_t *words) { add(sums, words); }
#ifdef __x86_64__
__attribute__((target("avx2"))) static void add_avx2(uint64_t *sums, const uint64_t *words) { add(sums, words); }
#define ADD(sums, words) (__builtin_cpu_supports("avx2") ? add_avx2 : add_anywhere)(sums, words)
#else
#define ADD(sums, words) add_anywhere(sums, words)
#endif
static void sum(const struct payload *payload, long block, const void *bytes) {
  if ((size_t)bytes & 7) return;
  ADD(payload->sums + block * (ROWS + COLUMNS), bytes);
  payload->known[block] = 1;
}
/* Sums of the blocks of a payload that are not known yet. */
void trainwarden_sum(const struct payload *payload, long blocks) {
  for (long block = 0; block < blocks; block++)
    if (!payload->known[block]) sum(payload, block, (const char *)payload->at + block * BLOCK);
}
static void copy(char *to, const char *from, size_t size) {
  size_t done = 0;
#ifdef __SSE2__
  if (((size_t)to & 15) == 0)
    for (; done + 4 * PAGE <= size; done += 4 * PAGE)
      for (size_t line = done; line < done + PAGE; line += 64)
        for (size_t at = line; at < line + 4 * PAGE; at += PAGE) {
          const __m128i *read = (const __m128i *)(from + at);
          __m128i *write = (__m128i *)(to + at);
          __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
          __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
          _mm_stream_si128(write, a), _mm_stream_si128(write + 1, b);
          _mm_stream_si128(write + 2, c), _mm_stream_si128(write + 3, d);
        }
  _mm_sfence();
#endif
  memcpy(to + done, from + done, size - done);
}
static void take_parts(struct work *work, int summing) {
  for (long mine; (mine = atomic_fetch_add(&work->next, 1)) < work->count;) {
    const struct part *part = &work->parts[mine];
    copy((char *)part->to, (const char *)part->from, part->size);
    /* from where it came: that is in the cache, and what was written has gone around it */
    if (summing && part->block >= 0) sum(&work->payload, part->block, (const void *)part->from);
  }
}
static void *take(void *given) {
  take_parts(given, 0);
  return NULL;
}
static void *take_idle(void *given) {
  struct work *work = given;
  struct sched_param none = {0};
  sched_setscheduler(0, SCHED_IDLE, &none);
  atomic_store(&work->id, (int)syscall(SYS_gettid));
  take_parts(work, 1);
  atomic_store(&work->id, 0);
  return NULL;
}
/* Parts of at most so many bytes, none over the edge of a block, whole blocks in one; with `parts` NULL just their number. */
static long cut(const struct whole *whole, long wholes, uint64_t most, uint64_t payload, struct part *parts) {
  long count = 0;
  for (long n = 0; n < wholes; n++)
    for (uint64_t at = 0, size; at < whole[n].size; at += size, count++) {
      uint64_t left = whole[n].size - at, inside = (whole[n].to + at - payload) % BLOCK;
      int64_t block = -1;
      size = left < most ? left : most;
      if (payload && !inside && left >= BLOCK) size = BLOCK, block = (whole[n].to + at - payload) / BLOCK;
      else if (payload && size > BLOCK - inside) size = BLOCK - inside;
      if (parts) parts[count] = (struct part){whole[n].to + at, whole[n].from + at, size, block};
    }
  return count;
}
/* NULL: no memory. With idle, a thread begins at once, when nothing else wants a core; with a payload (else NULL) it sums, too. */
struct work *trainwarden_copy_begin(
    const struct whole *whole, long wholes, uint64_t most, int idle, const struct payload *payload) {
  uint64_t at = payload ? payload->at : 0;
  long count = cut(whole, wholes, most, at, NULL);
  struct work *work = malloc(sizeof *work + count * sizeof *work->parts);
  if (!work) return NULL;
  atomic_init(&work->next, 0);
  atomic_init(&work->id, 0);
  if (payload) work->payload = *payload;
  work->count = cut(whole, wholes, most, at, work->parts);
  work->started = idle && pthread_create(&work->idle, NULL, take_idle, work) == 0;
  return work;
}
/* Copy what is left in this thread and so many more. The idle one is in nobody's way now: it gets this one's priority, if it may. */
void trainwarden_copy_help(struct work *work, int extra) {
  pthread_t more[MAX_EXTRA];
  struct sched_param mine;
  int made = 0, idle = atomic_load(&work->id);
  if (idle && sched_getparam(0, &mine) == 0) sched_setscheduler(idle, sched_getscheduler(0), &mine);
  while (made < extra && made < MAX_EXTRA && pthread_create(&more[made], NULL, take, work) == 0) made++;
  take_parts(work, 0);
  while (made) pthread_join(more[--made], NULL);
}
/* Wait for the idle thread to have copied all that it can take. */
void trainwarden_copy_wait(struct work *work) {
  if (work->started) pthread_join(work->idle, NULL);
  else take_parts(work, 0);
  work->started = 0;
}
void trainwarden_copy_end(struct work *work) { free(work); }
"""
Move = tuple[int, int, int]
"""Where to, where from (addresses), bytes."""


class BlockSums:
    """The sums of the blocks of a payload (writable), as far as whoever copied it has taken them on the way; 0.1 % of its size."""

    def __init__(self, payload: memoryview) -> None:
        self.count = len(payload) // BLOCK_BYTES
        self.sums = bytearray(max(1, self.count * SUMS * 8))
        self.known = bytearray(max(1, self.count))
        self.at = _address(payload)
        self._given = array.array("Q", (self.at, _address(self.sums), _address(self.known)))

    @property
    def handle(self) -> int:
        """For the library; valid while this is there."""
        return self._given.buffer_info()[0]


def _address(buffer: memoryview | bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Crew:
    """The library, opened once per process."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        handle = ctypes.c_void_p
        self.begin = library.trainwarden_copy_begin
        self.begin.restype, self.begin.argtypes = handle, [
            handle, ctypes.c_long, ctypes.c_uint64, ctypes.c_int, handle,
        ]  # fmt: skip
        self._sum = library.trainwarden_sum
        self._sum.restype, self._sum.argtypes = None, [handle, ctypes.c_long]
        self.help = library.trainwarden_copy_help
        self.help.restype, self.help.argtypes = None, [handle, ctypes.c_int]
        self.wait = library.trainwarden_copy_wait
        self.wait.restype, self.wait.argtypes = None, [handle]
        self.end = library.trainwarden_copy_end
        self.end.restype, self.end.argtypes = None, [handle]

    def complete(self, blocks: BlockSums) -> None:
        """Take the sums that are not known yet; the interpreter is free meanwhile."""
        self._sum(blocks.handle, blocks.count)

    def copy(self, moves: Sequence[Move], threads: int) -> None:
        """Copy now, on so many threads; the interpreter is free meanwhile."""
        job = Job(self, moves, idle=False)
        self.help(job.handle, threads - 1)
        job.wait()


class Job:
    """One copy. `help` may be called by one thread while another one is in `wait`; the memory must stay until that returns.

    Parameters
    ----------
    idle
        A thread of idle priority begins at once.
    blocks
        Of the payload that is copied to: that thread takes the sums of what it copies.

    Raises
    ------
    MemoryError
        For the list of parts.
    """

    def __init__(self, crew: Crew, moves: Sequence[Move], idle: bool, blocks: BlockSums | None = None) -> None:
        flat = array.array("Q", chain.from_iterable(moves))
        self._crew = crew
        self._busy = threading.Lock()
        self._blocks = blocks
        given = blocks.handle if blocks is not None else None
        self.handle = crew.begin(flat.buffer_info()[0], len(moves), PART_BYTES, int(idle), given)
        if not self.handle:
            raise MemoryError("no memory for the list of what is to be copied")

    def help(self, extra: int) -> None:
        """Copy what nobody has begun yet, here and in so many more threads."""
        with self._busy:
            if self.handle:
                self._crew.help(self.handle, extra)

    def wait(self) -> None:
        """Until all is copied."""
        self._crew.wait(self.handle)
        with self._busy:
            self._crew.end(self.handle)
            self.handle = None


def threads_that_pay() -> int:
    """More than a few do not copy faster, and cores that this process may not use do not count."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


_loading = threading.Lock()
_crew: Crew | None = None
_tried = False


def ready() -> Crew | None:
    """The crew, if `load` has been called and there is one."""
    return _crew


def load() -> Crew | None:
    """Open the library, and build it first where this node has none yet; ``None`` (told once in the log) if that fails."""
    global _crew, _tried
    with _loading:
        if not _tried:
            _tried = True
            try:
                _crew = _open()
            except (NotBuilt, OSError) as error:
                log.warning("saves are copied by slower means: %s", error)
        return _crew


def _open() -> Crew:
    folder = os.environ.get("TRAINWARDEN_RUN_DIR", "")
    if folder and os.path.isdir(folder):
        path = os.path.join(folder, f"copy-{zlib.crc32(SOURCE.encode()):08x}.so")
        if not os.path.exists(path):
            build(SOURCE, path, FLAGS)
        return Crew(path)
    with tempfile.TemporaryDirectory() as own:
        path = os.path.join(own, "copy.so")
        build(SOURCE, path, FLAGS)
        return Crew(path)
