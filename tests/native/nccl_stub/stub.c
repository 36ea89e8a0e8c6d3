/* A stand-in for libnccl over host memory and real processes. It has the functions that NcclCommunicator calls.
 *
 * The ranks meet in a file that the unique id names: barriers of all ranks, one slot for each rank, and a ring of
 * bytes from each rank to each other. "Streams" are ignored: a call returns when its work is done, so it blocks
 * where NCCL would have queued.
 *
 * It also checks the order of calls: what NCCL forbids, or what hangs there when a rank is lost, is a fault that
 * `stub_faults` returns.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 23203
#endif
#define MAX_RANKS 8
#define MAX_COMMS 64
#define SLOT (1 << 18)
#define RING (1 << 20)
enum { OK, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS };
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, E4M3, E5M2, TYPES };
static const size_t sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

typedef struct { char internal[128]; } Id;
typedef struct { _Atomic uint64_t written, read; char data[RING]; } Ring;
typedef struct {
  _Atomic int attached, finalized, arrived, generation, aborted;
  char slot[MAX_RANKS][SLOT];
  Ring ring[MAX_RANKS][MAX_RANKS];
  size_t window[MAX_RANKS];
  char roots[MAX_RANKS][MAX_RANKS * sizeof(Id)];
  _Atomic int process[MAX_RANKS];
} Shared;
typedef struct Comm {
  Shared *shared;
  int rank, size, state, aborting, linger, blocking;
  int finalizing;
  _Atomic int ended;
  char *window;
  size_t window_size;
} Comm;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;

static __thread char last_error[256];
static char next_function[64];
static int next_code, next_left;
static _Atomic int async_error, endless, declining, together, calls[12];
/* The communicators of this process that have not ended, and the faults so far. */
static Comm *_Atomic made[MAX_COMMS];
static char faults[4096];

/* --- functions with which tests control the stub */
void stub_fail(const char *function, int code, int times) {
  snprintf(next_function, sizeof next_function, "%s", function);
  next_code = code, next_left = times;
}
void stub_async_error(int code) { async_error = code; }
void stub_never_finishes(int yes) { endless = yes; }
void stub_declines_windows(int yes) { declining = yes; }
/* 0 aborts, 1 destroys, 2 finalizes, 3 group ends, 4 calls in progress, 5 allocations, 6 frees, 7 windows registered,
 * 8 deregistered, 9 sums whose memory lies in a window, 10 communicators finalized or aborted with a window,
 * 11 roots of communicators that were joined with several */
int stub_calls(int which) { return calls[which]; }

/* From now on an abort returns only when all communicators of this process that have a lost rank are being aborted: on a
 * device it waits for the kernels of all. */
void stub_aborts_together(int yes) { together = yes; }
const char *stub_faults(void) { return faults; }

static void fault(const char *format, ...) {
  size_t used = strlen(faults);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(faults + used, sizeof faults - used, format, arguments);
  va_end(arguments);
}

/* A process that has ended may wait for its parent to ask; one that is stopped is as good as lost. */
static int is_lost_process(int process) {
  char path[64], line[512], *name_end;
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "re");
  if (!file) return 1;
  char *found = fgets(line, sizeof line, file);
  fclose(file);
  name_end = found ? strrchr(line, ')') : NULL;
  return !name_end || strchr("ZXxTt", name_end[2]) != NULL;
}
static int has_lost_rank(Comm *comm) {
  for (int r = 0; r < comm->size; r++)
    if (comm->shared->process[r] && is_lost_process(comm->shared->process[r])) return 1;
  return 0;
}
static void forget(Comm *comm) {
  comm->ended = 1;
  for (int i = 0; i < MAX_COMMS; i++) if (made[i] == comm) made[i] = NULL;
}

static int complain(const char *function) {
  if (next_left > 0 && !strcmp(function, next_function)) {
    next_left--;
    snprintf(last_error, sizeof last_error, "the stub was told to fail in %s", function);
    return next_code;
  }
  return OK;
}
#define MAY_FAIL                          \
  do {                                    \
    int told = complain(__func__);        \
    if (told) return told;                \
  } while (0)

static void rest(void) {
  struct timespec moment = {0, 200000};
  nanosleep(&moment, NULL);
}
#define WAIT_UNTIL(comm, condition)                                             \
  for (int turn = 0; !(condition); turn++) {                                    \
    if ((comm)->aborting || (comm)->shared->aborted) {                          \
      snprintf(last_error, sizeof last_error, "the communicator was aborted");  \
      return REMOTE;                                                            \
    }                                                                           \
    if (turn < 50) sched_yield(); else rest();                                  \
  }

static int barrier(Comm *comm) {
  Shared *shared = comm->shared;
  int generation = shared->generation;
  if (atomic_fetch_add(&shared->arrived, 1) + 1 == comm->size) {
    shared->arrived = 0;
    shared->generation = generation + 1;
    return OK;
  }
  WAIT_UNTIL(comm, shared->generation != generation);
  return OK;
}

/* --- numbers */
static double half(uint16_t x) {
  int e = x >> 10 & 31, m = x & 1023;
  double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
  return x >> 15 ? -v : v;
}
static uint16_t to_half(float f) {
  _Float16 h = (_Float16)f;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
static float brain(uint16_t x) {
  uint32_t w = (uint32_t)x << 16;
  float f;
  memcpy(&f, &w, 4);
  return f;
}
static uint16_t to_brain(float f) {
  uint32_t w;
  memcpy(&w, &f, 4);
  if (f != f) return 0x7fc0;
  return (w + 0x7fff + (w >> 16 & 1)) >> 16;
}
static double eight(uint8_t x, int type) {
  if (type == E5M2) return half((uint16_t)(x << 8));
  int e = x >> 3 & 15, m = x & 7;
  double v = e == 15 && m == 7 ? NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
  return x >> 7 ? -v : v;
}
static uint8_t to_eight(double v, int type) {
  uint8_t best = 0;
  for (int x = 0; x < 256; x++) {
    double here = eight(x, type), there = eight(best, type);
    if (here != here || signbit(here) != signbit(v)) continue;
    if (signbit(there) != signbit(v)) best = x;
    else if (fabs(here - v) < fabs(there - v) || (fabs(here - v) == fabs(there - v) && !(x & 1))) best = x;
  }
  return best;
}
#define COMBINE(a, b)                                                                                  \
  (op == 0 || op == 4 ? (a) + (b) : op == 1 ? (a) * (b) : op == 2 ? ((b) > (a) || (b) != (b) ? (b) : (a)) \
                                                       : ((b) < (a) || (b) != (b) ? (b) : (a)))
#define REDUCE(T, load, store)                                              \
  for (size_t i = 0; i < count; i++) {                                      \
    T total = load(((const void **)parts)[0], i);                           \
    for (int r = 1; r < n; r++) {                                           \
      T next = load(((const void **)parts)[r], i);                          \
      total = COMBINE(total, next);                                         \
    }                                                                       \
    if (op == 4) total = total / (T)n;                                      \
    store(out, i, total);                                                   \
  }
#define PLAIN(T, U)                                                          \
  {                                                                          \
    REDUCE(U, GET_##T, PUT_##T)                                              \
  }                                                                          \
  break;
#define ACCESS(T)                                                                                \
  static T GET_##T(const void *p, size_t i) { T v; memcpy(&v, (const char *)p + i * sizeof v, sizeof v); return v; } \
  static void PUT_##T(void *p, size_t i, T v) { memcpy((char *)p + i * sizeof v, &v, sizeof v); }
ACCESS(int8_t) ACCESS(uint8_t) ACCESS(int32_t) ACCESS(uint32_t) ACCESS(int64_t) ACCESS(uint64_t)
ACCESS(float) ACCESS(double) ACCESS(uint16_t)
#define GET_HALF(p, i) (float)half(GET_uint16_t(p, i))
#define PUT_HALF(p, i, v) PUT_uint16_t(p, i, to_half(v))
#define GET_BRAIN(p, i) brain(GET_uint16_t(p, i))
#define PUT_BRAIN(p, i, v) PUT_uint16_t(p, i, to_brain(v))
#define GET_EIGHT(p, i) eight(GET_uint8_t(p, i), type)
#define PUT_EIGHT(p, i, v) PUT_uint8_t(p, i, to_eight(v, type))
static int reduce(void **parts, int n, void *out, size_t count, int type, int op) {
  switch (type) {
    case I8: PLAIN(int8_t, int8_t)
    case U8: PLAIN(uint8_t, uint8_t)
    case I32: PLAIN(int32_t, int32_t)
    case U32: PLAIN(uint32_t, uint32_t)
    case I64: PLAIN(int64_t, int64_t)
    case U64: PLAIN(uint64_t, uint64_t)
    case F32: PLAIN(float, float)
    case F64: PLAIN(double, double)
    case F16: { REDUCE(float, GET_HALF, PUT_HALF) } break;
    case BF16: { REDUCE(float, GET_BRAIN, PUT_BRAIN) } break;
    default: { REDUCE(double, GET_EIGHT, PUT_EIGHT) } break;
  }
  return OK;
}

/* --- what travels */
typedef enum { ALL_REDUCE, REDUCE_TO, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV } Kind;
typedef struct {
  Kind kind;
  const char *in;
  char *out;
  size_t count, done;
  int type, op, peer;
  Comm *comm;
} Op;
static __thread Op queue[256];
static __thread int queued, depth;

#define TRY(call)             \
  do {                        \
    int tried = (call);       \
    if (tried) return tried;  \
  } while (0)

static int reduce_piece(Op *it, const char *in, char *out, size_t count, int to) {
  Comm *comm = it->comm;
  void *parts[MAX_RANKS];
  memcpy(comm->shared->slot[comm->rank], in, count * sizes[it->type]);
  TRY(barrier(comm));
  for (int r = 0; r < comm->size; r++) parts[r] = comm->shared->slot[r];
  if (to < 0 || to == comm->rank) reduce(parts, comm->size, out, count, it->type, it->op);
  return barrier(comm);
}

static int collective(Op *it) {
  Comm *comm = it->comm;
  size_t size = sizes[it->type], most = SLOT / size;
  int parts = it->kind == REDUCE_SCATTER ? comm->size : 1;
  for (int part = 0; part < parts; part++)
    for (size_t at = 0; at < it->count; at += most) {
      size_t some = it->count - at < most ? it->count - at : most;
      const char *in = it->in + ((size_t)part * it->count + at) * size;
      char *out = it->out + at * size;
      if (it->kind == ALL_REDUCE) TRY(reduce_piece(it, in, out, some, -1));
      if (it->kind == REDUCE_TO) TRY(reduce_piece(it, in, out, some, it->peer));
      if (it->kind == REDUCE_SCATTER) TRY(reduce_piece(it, in, out, some, part));
      if (it->kind == BROADCAST || it->kind == ALL_GATHER) {
        if (it->kind == ALL_GATHER || it->peer == comm->rank) memcpy(comm->shared->slot[comm->rank], in, some * size);
        TRY(barrier(comm));
        if (it->kind == BROADCAST) memcpy(out, comm->shared->slot[it->peer], some * size);
        else for (int r = 0; r < comm->size; r++)
          memcpy(it->out + ((size_t)r * it->count + at) * size, comm->shared->slot[r], some * size);
        TRY(barrier(comm));
      }
    }
  return OK;
}

/* Move as many bytes of a transfer as possible now. An earlier transfer with the same peer goes first. */
static int advance(Op *all, int index) {
  Op *it = &all[index];
  size_t total = it->count * sizes[it->type];
  for (int i = 0; i < index; i++)
    if (all[i].kind == it->kind && all[i].peer == it->peer && all[i].comm == it->comm &&
        all[i].done < all[i].count * sizes[all[i].type]) return 0;
  Comm *comm = it->comm;
  Ring *ring = it->kind == SEND ? &comm->shared->ring[comm->rank][it->peer] : &comm->shared->ring[it->peer][comm->rank];
  uint64_t written = ring->written, read = ring->read;
  uint64_t space = it->kind == SEND ? RING - (written - read) : written - read;
  uint64_t at = (it->kind == SEND ? written : read) % RING;
  uint64_t some = total - it->done < space ? total - it->done : space;
  if (some > RING - at) some = RING - at;
  if (it->kind == SEND) {
    memcpy(ring->data + at, it->in + it->done, some);
    ring->written = written + some;
  } else {
    memcpy(it->out + it->done, ring->data + at, some);
    ring->read = read + some;
  }
  it->done += some;
  return it->done < total;
}

static int run(Op *all, int many) {
  for (int turn = 0, open = 1; open; turn++) {
    open = 0;
    for (int i = 0; i < many; i++) {
      if (all[i].kind < SEND) continue;
      if (advance(all, i) || all[i].done < all[i].count * sizes[all[i].type]) open = 1;
      if (all[i].comm->aborting) return REMOTE;
    }
    if (open && turn > 50) rest();
  }
  for (int i = 0; i < many; i++)
    if (all[i].kind < SEND) TRY(collective(&all[i]));
  return OK;
}

/* Every call of a non-blocking communicator is finished by a thread, as NCCL 2.23 and later do (2.28.9, group.cc:703-738). */
static int in_progress(Comm *comm) {
  if (comm->blocking) return OK;
  comm->linger = 2;
  calls[4]++;
  return IN_PROGRESS;
}

static int post(Op it) {
  if (!it.comm) {
    snprintf(last_error, sizeof last_error, "there is no communicator");
    return INVALID_USAGE;
  }
  if (it.comm->ended) fault("a call of a communicator that has ended; ");
  if (it.type < 0 || it.type >= TYPES || it.op < 0 || it.op > 4) return INVALID_ARGUMENT;
  if (depth) {
    if (queued == 256) return INTERNAL;
    queue[queued++] = it;
    return OK;
  }
  TRY(run(&it, 1));
  return in_progress(it.comm);
}

#define EXPORT __attribute__((visibility("default")))
EXPORT int ncclGroupStart(void) { MAY_FAIL; depth++; return OK; }
EXPORT int ncclGroupEnd(void) {
  if (depth == 0) return INVALID_USAGE;
  if (--depth) return OK;
  int many = queued, status = OK;
  queued = 0;
  MAY_FAIL;
  calls[3]++;
  TRY(run(queue, many));
  for (int i = 0; i < many; i++) status |= in_progress(queue[i].comm);
  return status;
}
EXPORT int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, Comm *comm, void *stream) {
  MAY_FAIL;
  if (comm && comm->window && (char *)in >= comm->window && (char *)out >= comm->window &&
      (char *)in < comm->window + comm->window_size && (char *)out < comm->window + comm->window_size) calls[9]++;
  return post((Op){ALL_REDUCE, in, out, count, 0, type, op, 0, comm});
}
EXPORT int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, Comm *comm, void *stream) {
  return post((Op){REDUCE_TO, in, out, count, 0, type, op, root, comm});
}
EXPORT int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, Comm *comm, void *stream) {
  return post((Op){REDUCE_SCATTER, in, out, count, 0, type, op, 0, comm});
}
EXPORT int ncclAllGather(const void *in, void *out, size_t count, int type, Comm *comm, void *stream) {
  return post((Op){ALL_GATHER, in, out, count, 0, type, 0, 0, comm});
}
EXPORT int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, Comm *comm, void *stream) {
  return post((Op){BROADCAST, in, out, count, 0, type, 0, root, comm});
}
EXPORT int ncclSend(const void *in, size_t count, int type, int peer, Comm *comm, void *stream) {
  return post((Op){SEND, in, NULL, count, 0, type, 0, peer, comm});
}
EXPORT int ncclRecv(void *out, size_t count, int type, int peer, Comm *comm, void *stream) {
  return post((Op){RECV, NULL, out, count, 0, type, 0, peer, comm});
}

/* --- windows; the ranks must register as many bytes as each other */
#if VERSION >= 22700
EXPORT int ncclMemAlloc(void **address, size_t size) {
  MAY_FAIL;
  calls[5]++;
  return posix_memalign(address, 4096, size) ? SYSTEM : OK;
}
EXPORT int ncclMemFree(void *address) { calls[6]++; free(address); return OK; }
EXPORT int ncclCommWindowRegister(Comm *comm, void *address, size_t size, void **window, int flags) {
  MAY_FAIL;
  if ((uintptr_t)address % 4096 || flags != 1) return INVALID_ARGUMENT;
  comm->shared->window[comm->rank] = size;
  TRY(barrier(comm));
  for (int r = 0; r < comm->size; r++) if (comm->shared->window[r] != size) return INVALID_ARGUMENT;
  TRY(barrier(comm));
  if (declining) return OK;
  calls[7]++;
  comm->window_size = size;
  *window = comm->window = address;
  return OK;
}
EXPORT int ncclCommWindowDeregister(Comm *comm, void *window) {
  if (!comm->window || window != comm->window) return INVALID_ARGUMENT;
  calls[8]++;
  comm->window = NULL;
  return OK;
}
#endif

/* --- life */
EXPORT int ncclGetVersion(int *version) { *version = VERSION; return OK; }
EXPORT const char *ncclGetErrorString(int code) { return code == REMOTE ? "remote process exited" : "an error of the stub"; }
EXPORT const char *ncclGetLastError(Comm *comm) { return last_error; }
EXPORT int ncclGetUniqueId(Id *id) {
  MAY_FAIL;
  const char *directory = getenv("TMPDIR");
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/nccl-XXXXXX", directory ? directory : "/tmp");
  int file = mkstemp(id->internal);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return SYSTEM;
  close(file);
  return OK;
}
static int attach(Comm **into, int size, const Id *id, int rank) {
  int file = open(id->internal, O_RDWR | O_CLOEXEC);
  if (file < 0) {
    snprintf(last_error, sizeof last_error, "no such communicator: %.100s", id->internal);
    return SYSTEM;
  }
  Comm *comm = calloc(1, sizeof *comm);
  comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  comm->rank = rank, comm->size = size, comm->linger = 2, comm->blocking = 1;
  comm->shared->process[rank] = getpid();
  for (int i = 0, kept = 0; i < MAX_COMMS && !kept; i++) {
    Comm *none = NULL;
    kept = atomic_compare_exchange_strong(&made[i], &none, comm);
  }
  if (atomic_fetch_add(&comm->shared->attached, 1) + 1 == size) unlink(id->internal);
  *into = comm;
  return OK;
}
EXPORT int ncclCommInitRankConfig(Comm **into, int size, Id id, int rank, Config *config) {
  MAY_FAIL;
  if (size < 1 || size > MAX_RANKS || config->magic != 0xcafebeef) return INVALID_ARGUMENT;
  TRY(attach(into, size, &id, rank));
  const char *told = getenv("NCCL_COMM_BLOCKING");
  (*into)->blocking = told ? atoi(told) : config->blocking;
  if (!(*into)->blocking) return IN_PROGRESS;
  WAIT_UNTIL(*into, (*into)->shared->attached == size);
  return OK;
}
#if VERSION >= 22300
/* The ranks meet in the file of the first root. All must pass the same roots, whose processes listen. */
EXPORT int ncclCommInitRankScalable(Comm **into, int size, int rank, int roots, Id *ids, Config *config) {
  MAY_FAIL;
  if (roots < 2 || roots > size) return INVALID_ARGUMENT;
  for (int i = 1; i < roots; i++) if (access(ids[i].internal, R_OK)) return SYSTEM;
  TRY(attach(into, size, &ids[0], rank));
  Shared *shared = (*into)->shared;
  memcpy(shared->roots[rank], ids, roots * sizeof *ids);
  TRY(barrier(*into));
  for (int r = 0; r < size; r++) if (memcmp(shared->roots[r], shared->roots[0], sizeof shared->roots[0])) return INVALID_ARGUMENT;
  TRY(barrier(*into));
  if (!rank) for (int i = 1; i < roots; i++) unlink(ids[i].internal);
  calls[11] += roots;
  return config->magic == 0xcafebeef ? OK : INVALID_ARGUMENT;
}
#endif
EXPORT int ncclCommGetAsyncError(Comm *comm, int *state) {
  *state = endless && !comm->blocking ? IN_PROGRESS : async_error;
  if (*state) return OK;
  if (comm->shared->attached < comm->size) { *state = IN_PROGRESS; return OK; }
  if (!comm->blocking && comm->linger > 0) { comm->linger--; *state = IN_PROGRESS; return OK; }
  if (comm->finalizing && comm->shared->finalized < comm->size) *state = IN_PROGRESS;
  return OK;
}
/* No rank may call it: it orders ranks by itself, and has hung. */
EXPORT int ncclCommShrink(Comm *comm) { fault("ncclCommShrink; "); return INVALID_USAGE; }
EXPORT int ncclCommFinalize(Comm *comm) {
  MAY_FAIL;
  if (comm->ended) fault("ncclCommFinalize of a communicator that has ended; ");
  else if (has_lost_rank(comm)) {
    /* NCCL would wait for ever. */
    fault("ncclCommFinalize of a communicator with a lost rank; ");
    return REMOTE;
  }
  calls[2]++;
  if (comm->window) calls[10]++;
  comm->finalizing = 1;
  atomic_fetch_add(&comm->shared->finalized, 1);
  if (!comm->blocking) return IN_PROGRESS;
  WAIT_UNTIL(comm, !endless && comm->shared->finalized == comm->size);
  return OK;
}
EXPORT int ncclCommDestroy(Comm *comm) {
  calls[1]++;
  if (!comm->finalizing) fault("ncclCommDestroy of a communicator that was not finalized; ");
  forget(comm);
  munmap(comm->shared, sizeof(Shared));
  free(comm);
  return OK;
}
/* It frees nothing, because a thread may still be in a call. A rank that finalizes does not wait for one that aborts. */
EXPORT int ncclCommAbort(Comm *comm) {
  MAY_FAIL;
  calls[0]++;
  if (comm->window) calls[10]++;
  comm->aborting = 1;
  if (!comm->finalizing) atomic_fetch_add(&comm->shared->finalized, 1);
  for (int i = 0, turns = 0; together && i < MAX_COMMS; i++) {
    Comm *other = made[i];
    if (!other || other->aborting || !has_lost_rank(other)) continue;
    if (turns++ == 2000) {
      fault("ncclCommAbort waits for kernels that nobody aborts; ");
      together = 0;
    }
    rest();
    i = -1;
  }
  forget(comm);
  return OK;
}
