// Pre-packed models in memory: a process writes a model into two memfds, and their creator seals
// them. Any number of ordinary processes load the model from these memfds. Like the children of a
// zygote, they share the model's pages, but they need no fork.
#define _GNU_SOURCE
#include "zygote.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define OPEN_FILES "/proc/self/fd/"

// The descriptors, as paths for ONNX Runtime. The graph contains the path of the weights.
static const char graph[] = OPEN_FILES "4", weights[] = "5";
_Static_assert(SC_GRAPH_FD == 4 && SC_WEIGHTS_FD == 5, "the names say these numbers");

// realpath overrides the C library's function. ONNX Runtime calls it to check that the file of a
// model's weights is in the model's folder. A memfd has no path, so the C library's realpath fails
// for it. This realpath returns the path of an open file in /proc/self/fd unchanged, and passes all
// other paths to the C library.
char *realpath(const char *restrict path, char *restrict to) {
  size_t n = sizeof OPEN_FILES - 1;
  if (path && !to && strncmp(path, OPEN_FILES, n) == 0 && path[n + strspn(path + n, "0123456789")] == 0) return strdup(path);
  char *(*real)(const char *, char *) = (char *(*)(const char *, char *))dlsym(RTLD_NEXT, "realpath");
  return real(path, to);
}

// sc_pack leaves the files as ONNX Runtime writes them. The original weights take almost half of
// their size, and must stay: when ONNX Runtime loads the model, it finds a pre-packed weight by the
// content of the original weight.
char *sc_pack(const sc_options *plain) {
  sc_options o = *plain;
  sc_session *s;
  for (int fd = SC_GRAPH_FD; fd <= SC_WEIGHTS_FD; fd++) {
    if (fcntl(fd, F_GETFD) < 0) return sc_message("descriptor %d: %s", fd, strerror(errno));
  }
  o.write = graph;
  o.weights = weights;
  char *err = sc_open(&o, &s);
  if (!err) sc_close(s);
  return err;
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
  malloc_trim(0); // frees memory that packing needed
  return NULL;
}
