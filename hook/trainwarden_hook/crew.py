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
struct part { uint64_t to, from, size; };
struct work { atomic_long next; atomic_int id; long count; int started; pthread_t idle; struct part parts[]; };

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
static void *take(void *given) {
  struct work *work = given;
  for (long mine; (mine = atomic_fetch_add(&work->next, 1)) < work->count;)
    copy((char *)work->parts[mine].to, (const char *)work->parts[mine].from, work->parts[mine].size);
  return NULL;
}
static void *take_idle(void *given) {
  struct work *work = given;
  struct sched_param none = {0};
  sched_setscheduler(0, SCHED_IDLE, &none);
  atomic_store(&work->id, (int)syscall(SYS_gettid));
  take(work);
  atomic_store(&work->id, 0);
  return NULL;
}
/* NULL: no memory. With idle, a thread begins at once, when nothing else wants a core. */
struct work *trainwarden_copy_begin(const struct part *whole, long wholes, uint64_t most, int idle) {
  long count = 0;
  for (long n = 0; n < wholes; n++) count += (whole[n].size + most - 1) / most;
  struct work *work = malloc(sizeof *work + count * sizeof *whole);
  if (!work) return NULL;
  atomic_init(&work->next, 0);
  atomic_init(&work->id, 0);
  work->count = 0;
  for (long n = 0; n < wholes; n++)
    for (uint64_t at = 0; at < whole[n].size; at += most) {
      uint64_t left = whole[n].size - at;
      work->parts[work->count++] = (struct part){whole[n].to + at, whole[n].from + at, left < most ? left : most};
    }
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
  take(work);
  while (made) pthread_join(more[--made], NULL);
}
/* Wait for the idle thread to have copied all that it can take. */
void trainwarden_copy_wait(struct work *work) {
  if (work->started) pthread_join(work->idle, NULL);
  else take(work);
  work->started = 0;
}
void trainwarden_copy_end(struct work *work) { free(work); }
"""
Move = tuple[int, int, int]
"""Where to, where from (addresses), bytes."""


class Crew:
    """The library, opened once per process."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        handle = ctypes.c_void_p
        self.begin = library.trainwarden_copy_begin
        self.begin.restype, self.begin.argtypes = handle, [handle, ctypes.c_long, ctypes.c_uint64, ctypes.c_int]
        self.help = library.trainwarden_copy_help
        self.help.restype, self.help.argtypes = None, [handle, ctypes.c_int]
        self.wait = library.trainwarden_copy_wait
        self.wait.restype, self.wait.argtypes = None, [handle]
        self.end = library.trainwarden_copy_end
        self.end.restype, self.end.argtypes = None, [handle]

    def copy(self, moves: Sequence[Move], threads: int) -> None:
        """Copy now, on so many threads; the interpreter is free meanwhile."""
        job = Job(self, moves, idle=False)
        self.help(job.handle, threads - 1)
        job.wait()


class Job:
    """One copy. `help` may be called by one thread while another one is in `wait`; the memory must stay until that returns.

    Raises
    ------
    MemoryError
        For the list of parts.
    """

    def __init__(self, crew: Crew, moves: Sequence[Move], idle: bool) -> None:
        flat = array.array("Q", chain.from_iterable(moves))
        self._crew = crew
        self._busy = threading.Lock()
        self.handle = crew.begin(flat.buffer_info()[0], len(moves), PART_BYTES, int(idle))
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
            build(SOURCE, path, ("-pthread",))
        return Crew(path)
    with tempfile.TemporaryDirectory() as own:
        path = os.path.join(own, "copy.so")
        build(SOURCE, path, ("-pthread",))
        return Crew(path)
