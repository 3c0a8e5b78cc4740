// Pre-packed models: ONNX Runtime writes an optimised model to a file once, with the weights in the
// layout of its kernels. A zygote that loads this file has its weights in file mappings instead of
// its heap. A fork then copies only the remaining page tables.
#define _GNU_SOURCE
#include "zygote.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void remove_prepacked(const char *dir) {
  for (int i = 0; i < 2; i++) {
    char *file = sc_message("%s/%s", dir, i ? "weights.bin" : "model.onnx");
    unlink(file);
    free(file);
  }
  rmdir(dir);
}

// write_prepacked writes the optimised model and its pre-packed weights into a new folder dir. A
// child does the work, so that the zygote's own heap stays small. write_prepacked returns true if
// the folder exists afterwards.
static int write_prepacked(const sc_options *plain, const char *dir) {
  char *partial = sc_message("%s.%d", dir, (int)getpid());
  remove_prepacked(partial);
  if (mkdir(partial, 0755) < 0) {
    dprintf(STDERR_FILENO, "zygote: pre-packed weights: make %s: %s\n", partial, strerror(errno));
    free(partial);
    return 0;
  }
  pid_t self = getpid(), pid = fork();
  if (pid == 0) {
    sc_options o = *plain;
    sc_session *s;
    o.write = sc_message("%s/model.onnx", partial);
    o.weights = "weights.bin";
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != self) _exit(1);
    char *err = sc_open(&o, &s);
    if (err) dprintf(STDERR_FILENO, "zygote: pre-packed weights: %s\n", err);
    _exit(err ? 1 : 0);
  }
  int status = -1;
  while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  struct stat seen;
  int done = pid > 0 && status == 0 && (rename(partial, dir) == 0 || stat(dir, &seen) == 0);
  if (pid > 0 && status) dprintf(STDERR_FILENO, "zygote: pre-packed weights: writing ended with wait status %d\n", status);
  remove_prepacked(partial); // removes leftovers, unless another zygote was faster
  free(partial);
  return done;
}

#ifndef MADV_POPULATE_READ // Linux 5.14
#define MADV_POPULATE_READ 22
#endif

// populate maps the pages of the weights into the zygote. Children then find them in memory, and
// the zygote's size includes them. An older kernel maps each page on first use.
static void populate(const char *dir) {
  FILE *maps = fopen("/proc/self/maps", "re");
  char *weights = sc_message("%s/weights.bin", dir), *line = NULL;
  size_t size = 0;
  while (maps && getline(&line, &size, maps) > 0) {
    unsigned long from, to;
    if (strstr(line, weights) && sscanf(line, "%lx-%lx", &from, &to) == 2)
      madvise((void *)from, to - from, MADV_POPULATE_READ);
  }
  free(line);
  free(weights);
  if (maps) fclose(maps);
}

sc_session *sc_open_prepacked(const char *parent, const char *version, const sc_options *plain, int may_write) {
  if (!parent || !*parent) return NULL;
  const char *name = strrchr(plain->model, '/');
  char *dir = sc_message("%s/%s.ort-%s.prepacked", parent, name ? name + 1 : plain->model, version);
  char *file = sc_message("%s/model.onnx", dir);
  sc_session *session = NULL;
  if (access(file, R_OK) == 0 || (may_write && write_prepacked(plain, dir))) {
    sc_options o = *plain;
    o.model = file;
    o.as_is = 1;
    char *err = sc_open(&o, &session);
    if (err) {
      dprintf(STDERR_FILENO, "zygote: pre-packed weights: %s; %sloading %s itself\n", err, may_write ? "removed, and " : "",
              plain->model);
      if (may_write) remove_prepacked(dir);
      free(err);
    } else {
      populate(dir);
      free(session->model);
      session->model = strdup(plain->model); // the name in messages
      session->prepacked = 1;
    }
  }
  free(file);
  free(dir);
  return session;
}
