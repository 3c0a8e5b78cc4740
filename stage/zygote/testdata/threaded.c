// ONNX Runtime with a thread of its own, as versions from 1.29 on have. THREADED_ORT names the real
// library, at compile time or in the environment.
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef THREADED_ORT
#define REAL THREADED_ORT
#else
#define REAL getenv("THREADED_ORT")
#endif

static void *linger(void *unused) {
  for (;;) pause();
  return unused;
}

const void *OrtGetApiBase(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, linger, NULL);
  void *library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  const void *(*real)(void) = (const void *(*)(void))dlsym(library, "OrtGetApiBase");
  return real();
}
