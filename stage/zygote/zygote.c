// The zygote is a C constructor that runs before the Go runtime, while the process has one thread.
// It loads ONNX Runtime and the model, then serves fork orders. Only forked children return from
// it, into a normal Go main. A process that packs a model ends in the constructor, and a process
// that is neither returns from it at once. Package wire, order.go, has the layouts of the messages.
#define _GNU_SOURCE
#include "zygote.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ENV_FD "STAGECOACH_ZYGOTE_FD"
#define ENV_MODEL "STAGECOACH_MODEL"
#define ENV_ORT "STAGECOACH_ORT_LIB"
#define ENV_THREADS "STAGECOACH_POOL_THREADS"
#define ENV_PACK "STAGECOACH_PACK"
#define ENV_PREPACKED "STAGECOACH_PREPACKED"
#define ENV_SEALED "STAGECOACH_SEALED"

enum {
  VERSION = 3,
  HEADER = 8,             // bytes of an order before its environment
  MAX_MESSAGE = 64 << 10, // bytes of an order
  MAX_CHILDREN = 1024,
  BEGIN_FDS = 3, // stage socket, stdout, stderr
  MAX_FDS = 16,  // accepted with one order, which is refused if it has too many
  STAGE_FD = 3,  // where a child has its gate, and later its stage socket
  NO_ID = -1,    // the id of an error without a fork order
  MAX_ERROR = 512, // bytes of an error's text
};

int sc_child_fd = -1;
const char *sc_child_env;
size_t sc_child_env_bytes;
sc_session *sc_inherited;
static int control = -1, children_signal = -1;
static sigset_t original_mask;
static char own_name[16]; // the program's name, as ps shows it

// A child that has not been reaped.
static struct child {
  pid_t pid;
  uint32_t id; // id of its fork order
} children[MAX_CHILDREN];
static int n_children;
static char order[MAX_MESSAGE];

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void put(unsigned char *to, uint64_t v, int bytes) {
  for (int i = 0; i < bytes; i++) to[i] = (unsigned char)(v >> (8 * i));
}

static uint32_t get(const char *from, int bytes) {
  uint32_t v = 0;
  for (int i = bytes; i-- > 0;) v = v << 8 | (unsigned char)from[i];
  return v;
}

// tell sends one message. If the manager has gone, it ends the zygote, and with it the children.
static void tell(const void *message, size_t n) {
  while (send(control, message, n, MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) _exit(0);
  }
}

static void tell_error(uint32_t id, int why, const char *text) {
  unsigned char m[HEADER + MAX_ERROR] = {'E', VERSION};
  size_t n = strnlen(text, MAX_ERROR);
  put(m + 2, (uint64_t)why, 2);
  put(m + 4, id, 4);
  memcpy(m + HEADER, text, n);
  tell(m, HEADER + n);
}

// refuse reports why an order is not carried out, and frees text.
static void refuse(uint32_t id, char *text) {
  tell_error(id, 0, text);
  free(text);
}

// give_up ends the zygote. why is 1 if only forking is impossible, else 0.
__attribute__((noreturn)) static void give_up(int why, const char *text) {
  tell_error(0, why, text);
  _exit(1);
}

// reap waits for every child that has ended, and reports each of them.
static void reap(void) {
  struct signalfd_siginfo drained;
  while (read(children_signal, &drained, sizeof drained) > 0) {
  }
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    int i = 0;
    while (i < n_children && children[i].pid != pid) i++;
    if (i == n_children) continue;
    children[i] = children[--n_children];
    unsigned char m[12] = {'X', VERSION};
    put(m + 4, (uint32_t)pid, 4);
    put(m + 8, (uint32_t)status, 4);
    tell(m, sizeof m);
  }
}

__attribute__((noreturn)) static void end_child(const char *what) {
  dprintf(STDERR_FILENO, "zygote: new replica: %s: %s\n", what, strerror(errno));
  _exit(1);
}

// A message from a socket: n bytes of order, and the descriptors beside it.
struct received {
  ssize_t n;
  int cut, fds[MAX_FDS], n_fds; // cut: a part of it was lost
};

static struct received receive_from(int socket) {
  union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
  } rights;
  struct iovec piece = {order, sizeof order};
  struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
  struct received r = {.n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC)};
  if (r.n <= 0) return r;
  r.cut = m.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
  for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    r.n_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(r.fds, CMSG_DATA(c), sizeof(int) * (size_t)r.n_fds);
  }
  return r;
}

// leave_zygote prepares a new child:
// - The child ends with its zygote.
// - Its only descriptors are stdin, stdout, stderr and its gate.
// - It has the signal mask that the zygote was started with.
// - It has random seeds of its own. The kernel has put the zygote's seeds at AT_RANDOM, where the
//   Go runtime of the child reads them.
static void leave_zygote(pid_t zygote, int gate) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0) end_child("parent-death signal");
  if (getppid() != zygote) _exit(1); // the zygote ended before the signal was set
  if (gate != STAGE_FD && dup3(gate, STAGE_FD, O_CLOEXEC) < 0) end_child("gate");
  if (syscall(SYS_close_range, STAGE_FD + 1, ~0u, 0) < 0) end_child("close_range, which needs Linux 5.9 or later");
  void *seed = (void *)getauxval(AT_RANDOM);
  if (seed && getrandom(seed, 16, 0) != 16) end_child("random seed");
  sigprocmask(SIG_SETMASK, &original_mask, NULL);
}

// become_replica waits at its gate for the begin order. A closed gate means that the child is not
// needed.
static void become_replica(void) {
  struct received r;
  while ((r = receive_from(STAGE_FD)).n < 0 && errno == EINTR) continue;
  if (r.n == 0) _exit(0);
  if (r.n < 0) end_child("gate");
  errno = EPROTO;
  if (r.cut || r.n < HEADER || order[0] != 'B' || order[1] != VERSION || r.n_fds != BEGIN_FDS) end_child("invalid begin order");
  if (r.n > HEADER && order[r.n - 1] != 0) end_child("environment, whose last string has no end");
  if (dup2(r.fds[1], STDOUT_FILENO) < 0 || dup2(r.fds[2], STDERR_FILENO) < 0) end_child("stdout and stderr");
  if (dup3(r.fds[0], STAGE_FD, O_CLOEXEC) < 0) end_child("stage socket");
  syscall(SYS_close_range, STAGE_FD + 1, ~0u, 0);
  prctl(PR_SET_NAME, own_name);
  char *err = sc_inherited ? sc_start_threads(sc_inherited, (int)get(order + 2, 2) - 1, NULL) : NULL;
  if (err) {
    dprintf(STDERR_FILENO, "zygote: new replica: %s\n", err);
    _exit(1);
  }
  sc_child_fd = STAGE_FD, sc_child_env = order + HEADER, sc_child_env_bytes = (size_t)r.n - HEADER;
}

// fork_replica carries out a fork order. It returns true in the child.
static int fork_replica(size_t n, const int *fds, int n_fds) {
  uint64_t start = now();
  uint32_t id = get(order + 4, 4);
  pid_t self = getpid(), pid = 0;
  char *err = NULL;
  if (n_fds != 1)
    err = sc_message("fork: %d descriptors, want 1: the gate", n_fds);
  else if (n != HEADER)
    err = sc_message("fork: %zu bytes, want %d", n, HEADER);
  else if (n_children == MAX_CHILDREN)
    err = sc_message("fork: %d replicas live, want fewer", n_children);
  else {
    prctl(PR_SET_NAME, "spare"); // the child has this name from its first instant
    if ((pid = fork()) != 0) prctl(PR_SET_NAME, own_name);
    if (pid < 0) err = sc_message("fork: %s", strerror(errno));
  }
  if (err) {
    refuse(id, err);
    return 0;
  }
  if (pid == 0) return leave_zygote(self, fds[0]), become_replica(), 1;
  children[n_children++] = (struct child){.pid = pid, .id = id};
  unsigned char m[24] = {'C', VERSION};
  put(m + 4, id, 4);
  put(m + 8, (uint32_t)pid, 4);
  put(m + 16, now() - start, 8);
  tell(m, sizeof m);
  return 0;
}

// kill_replica signals a child that has not been reaped, whose pid is therefore still valid. It
// ignores other pids, because the end of their processes has been reported.
static void kill_replica(void) {
  int signal = (int)get(order + 2, 2);
  pid_t pid = (pid_t)get(order + 4, 4);
  for (int i = 0; i < n_children; i++) {
    if (children[i].pid == pid && kill(pid, signal) < 0) {
      refuse(NO_ID, sc_message("kill %d with signal %d: %s", (int)pid, signal, strerror(errno)));
    }
  }
}

// list_children reports every child that has not been reaped.
static void list_children(void) {
  for (int i = 0; i < n_children; i++) {
    unsigned char m[12] = {'A', VERSION};
    put(m + 4, children[i].id, 4);
    put(m + 8, (uint32_t)children[i].pid, 4);
    tell(m, sizeof m);
  }
  unsigned char m[HEADER] = {'L', VERSION};
  memcpy(m + 4, order + 4, 4);
  tell(m, sizeof m);
}

// handle carries out an order of n bytes. It returns true in a new child.
static int handle(size_t n, int cut, const int *fds, int n_fds) {
  int whole = n >= HEADER;
  uint32_t id = whole && order[0] == 'F' ? get(order + 4, 4) : (uint32_t)NO_ID;
  if (cut) {
    refuse(id, sc_message("order: above %d bytes or %d descriptors, want less", MAX_MESSAGE, MAX_FDS));
  } else if (!whole) {
    refuse(id, sc_message("order: %zu bytes, want at least %d", n, HEADER));
  } else if (order[1] != VERSION) {
    refuse(id, sc_message("order: version %d, want %d", order[1], VERSION));
  } else if (order[0] == 'F') {
    return fork_replica(n, fds, n_fds);
  } else if (order[0] == 'K' && n == HEADER) {
    kill_replica();
  } else if (order[0] == 'L' && n == HEADER) {
    list_children();
  } else {
    refuse(id, sc_message("order: kind %d of %zu bytes, want F, K or L", order[0], n));
  }
  return 0;
}

// receive handles one order from the control socket. The socket's end of file ends the zygote.
// receive returns true in a new child.
static int receive(void) {
  struct received r = receive_from(control);
  if (r.n < 0 && errno == EINTR) return 0;
  if (r.n <= 0) _exit(0);
  if (handle((size_t)r.n, r.cut, r.fds, r.n_fds)) return 1;
  for (int i = 0; i < r.n_fds; i++) close(r.fds[i]);
  return 0;
}

// serve returns only in children.
static void serve(void) {
  struct pollfd on[2] = {{.fd = control, .events = POLLIN}, {.fd = children_signal, .events = POLLIN}};
  for (;;) {
    if (poll(on, 2, -1) < 0 && errno != EINTR) _exit(1);
    if (on[1].revents) reap();
    if (on[0].revents && receive()) return;
  }
}

// pool_threads returns the maximum number of threads of a session. If it sets err, it returns 0.
static int pool_threads(char **err) {
  const char *text = getenv(ENV_THREADS);
  if (text && *text) {
    char *rest;
    long n = strtol(text, &rest, 10);
    if (*rest || n < 1 || n > SC_MAX_THREADS) {
      *err = sc_message("%s=%s, want a number of 1..%d", ENV_THREADS, text, SC_MAX_THREADS);
      return 0;
    }
    return (int)n;
  }
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) < 0) return 1;
  return CPU_COUNT(&cpus) < SC_MAX_THREADS ? CPU_COUNT(&cpus) : SC_MAX_THREADS;
}

static int count_threads(void) {
  int n = 0;
  DIR *d = opendir("/proc/self/task");
  for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
  if (d) closedir(d);
  return n;
}

// open_library opens the library for the model that the environment names, and fills in the
// options.
static char *open_library(const char *model, sc_options *o, const char **version) {
  const char *library = getenv(ENV_ORT);
  if (!library || !*library) return sc_message("no %s, want the path of ONNX Runtime's library, to load %s", ENV_ORT, ENV_MODEL);
  char *err = NULL;
  *o = (sc_options){.model = model, .threads = pool_threads(&err)};
  return err ? err : sc_load(library, version);
}

// check_threads ends a zygote whose library has started threads, because children would lack them.
static void check_threads(const char *version) {
  int threads = count_threads();
  if (threads > 1) {
    give_up(1, sc_message("%d threads after loading, want 1: ONNX Runtime %s has started some of its own", threads, version));
  }
}

static void load_model(const char *model) {
  const char *version;
  sc_options o;
  char *err = open_library(model, &o, &version);
  if (err) give_up(0, err);
  check_threads(version); // before the model is loaded, which takes long
  sc_inherited = sc_open_prepacked(getenv(ENV_PREPACKED), version, &o, 1);
  if (!sc_inherited) err = sc_open(&o, &sc_inherited);
  if (err) give_up(0, err);
  malloc_trim(0); // each fork would copy the page tables of unused memory
  check_threads(version);
}

// pack_model writes the pre-packed form of the model to its two descriptors, and ends.
__attribute__((noreturn)) static void pack_model(const char *model) {
  const char *version;
  sc_options o;
  char *err = model && *model ? open_library(model, &o, &version) : sc_message("no %s", ENV_MODEL);
  if (!err) err = sc_pack(&o);
  if (err) dprintf(STDERR_FILENO, "zygote: pack %s: %s\n", model ? model : "", err);
  _exit(err ? 1 : 0);
}

// drop removes a variable from the environment on the stack, where the Go runtime reads it.
static void drop(char **envp, const char *name) {
  size_t n = strlen(name);
  char **to = envp;
  for (char **from = envp; *from; from++) {
    if (strncmp(*from, name, n) != 0 || (*from)[n] != '=') *to++ = *from;
  }
  *to = NULL;
}

// take_control adopts the descriptor that the environment names, once.
static int take_control(char **envp) {
  const char *text = getenv(ENV_FD);
  if (!text) return 0;
  char *rest;
  long fd = strtol(text, &rest, 10);
  int flags = *text && !*rest && fd >= 0 && fd <= 1 << 20 ? fcntl((int)fd, F_GETFL) : -1;
  if (flags < 0 || fcntl((int)fd, F_SETFL, flags & ~O_NONBLOCK) < 0 || fcntl((int)fd, F_SETFD, FD_CLOEXEC) < 0) {
    dprintf(STDERR_FILENO, "zygote: %s=%s, want the number of an open SOCK_SEQPACKET socket\n", ENV_FD, text);
    _exit(1);
  }
  control = (int)fd;
  drop(envp, ENV_FD);
  return 1;
}

__attribute__((constructor)) static void zygote(int argc, char **argv, char **envp) {
  (void)argc, (void)argv;
  uint64_t start = now();
  // Children inherit it, so they cannot look into each other.
  if (getenv(ENV_SEALED)) prctl(PR_SET_DUMPABLE, 0);
  const char *model = getenv(ENV_MODEL);
  if (getenv(ENV_PACK)) pack_model(model);
  if (!take_control(envp)) return;
  if (model && *model) load_model(model);
  prctl(PR_GET_NAME, own_name);
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, &original_mask);
  children_signal = signalfd(-1, &child, SFD_NONBLOCK | SFD_CLOEXEC);
  if (children_signal < 0) give_up(0, sc_message("signalfd: %s", strerror(errno)));
  unsigned char m[24] = {'R', VERSION};
  put(m + 2, (uint64_t)sc_recorded(sc_inherited), 2);
  put(m + 4, (uint32_t)getpid(), 4);
  put(m + 8, now() - start, 8);
  put(m + 16, sc_inherited && sc_inherited->prepacked, 4);
  tell(m, sizeof m);
  serve();
}
