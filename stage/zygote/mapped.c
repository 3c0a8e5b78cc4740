// Pre-packed models in memory: a process writes one to two memfds, which whoever made them seals, and any number of
// ordinary processes load it from there. They share its pages, as a zygote's children do, without being forked.
#define _GNU_SOURCE
#include "zygote.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NUMBER_(n) #n
#define NUMBER(n) NUMBER_(n)
#define OPEN_FILES "/proc/self/fd/"

// The descriptors as ONNX Runtime names them. The name of the weights is in the graph.
static const char graph[] = OPEN_FILES "4", weights[] = "5";
_Static_assert(SC_GRAPH_FD == 4 && SC_WEIGHTS_FD == 5, "the names say these numbers");

// realpath is called by ONNX Runtime for the file of a model's weights, to see that it lies in the model's folder. A memfd has
// no path, so that the C library's realpath fails for it: here the name of an open file is its path. All else is the C
// library's.
char *realpath(const char *restrict path, char *restrict to) {
  if (path && !to && strncmp(path, OPEN_FILES, sizeof OPEN_FILES - 1) == 0) return strdup(path);
  char *(*real)(const char *, char *) = (char *(*)(const char *, char *))dlsym(RTLD_NEXT, "realpath");
  return real(path, to);
}

// range is a part of the weights' file, in whole pages.
struct range {
  off_t from, to;
};

static int by_offset(const void *a, const void *b) {
  const struct range *x = a, *y = b;
  return (x->from > y->from) - (x->from < y->from);
}

// used returns the n parts of the weights' file that this process maps, in order.
static struct range *used(size_t *n) {
  struct stat file;
  struct range *all = NULL;
  char *line = NULL;
  size_t size = 0;
  FILE *maps = fopen("/proc/self/maps", "re");
  *n = 0;
  while (maps && fstat(SC_WEIGHTS_FD, &file) == 0 && getline(&line, &size, maps) > 0) {
    unsigned long from, to, offset, inode;
    if (sscanf(line, "%lx-%lx %*s %lx %*s %lu", &from, &to, &offset, &inode) != 4) continue;
    if (inode != file.st_ino || !strstr(line, "/memfd:")) continue;
    all = realloc(all, (*n + 1) * sizeof *all);
    all[(*n)++] = (struct range){(off_t)offset, (off_t)(offset + (to - from))};
  }
  free(line);
  if (maps) fclose(maps);
  if (all) qsort(all, *n, sizeof *all, by_offset);
  return all;
}

static void punch(off_t from, off_t to) {
  if (from < to) fallocate(SC_WEIGHTS_FD, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, to - from);
}

static off_t blocks(void) {
  struct stat file;
  return fstat(SC_WEIGHTS_FD, &file) == 0 ? file.st_blocks : -1;
}

// write_mapped has ONNX Runtime write the files.
static char *write_mapped(const sc_options *plain) {
  sc_options o = *plain;
  sc_session *s;
  o.write = graph;
  o.weights = weights;
  char *err = sc_open(&o, &s);
  if (!err) sc_close(s);
  return err;
}

// sc_pack also takes out of memory what ONNX Runtime writes and does not use: the weights as they were before they were
// pre-packed, almost half of the file. What is not mapped by a session is not used, unless it was read and let go while the
// session was made: then a second session finds a hole there, which its reading fills, and all is written anew.
char *sc_pack(const sc_options *plain) {
  struct stat files[2];
  for (int i = 0; i < 2; i++) {
    if (fstat(i ? SC_WEIGHTS_FD : SC_GRAPH_FD, &files[i]) < 0) return sc_message("descriptor %d: %s", i ? SC_WEIGHTS_FD : SC_GRAPH_FD, strerror(errno));
  }
  sc_session *s;
  char *err = write_mapped(plain);
  if (!err) err = sc_open_mapped(plain, &s);
  if (err) return err;
  size_t n;
  struct range *parts = used(&n);
  sc_close(s);
  off_t end = 0;
  for (size_t i = 0; i < n; i++) {
    punch(end, parts[i].from);
    if (parts[i].to > end) end = parts[i].to;
  }
  if (fstat(SC_WEIGHTS_FD, &files[1]) == 0) punch(end, files[1].st_size);
  free(parts);
  off_t before = blocks();
  if ((err = sc_open_mapped(plain, &s)) != NULL) return err;
  sc_close(s);
  return blocks() == before ? NULL : write_mapped(plain);
}

char *sc_open_mapped(const sc_options *plain, sc_session **session) {
  sc_options o = *plain;
  o.model = graph;
  o.as_is = 1;
  char *err = sc_open(&o, session);
  if (err) return err;
  free((*session)->model);
  (*session)->model = strdup(plain->model);
  (*session)->prepacked = 1;
  return NULL;
}
