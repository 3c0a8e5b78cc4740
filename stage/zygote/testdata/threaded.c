// ONNX Runtime with a thread of its own, as versions from 1.29 on have: THREADED_ORT names the real library.
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static void *linger(void *unused) {
  for (;;) pause();
  return unused;
}

const void *OrtGetApiBase(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, linger, NULL);
  void *library = dlopen(getenv("THREADED_ORT"), RTLD_NOW | RTLD_LOCAL);
  const void *(*real)(void) = (const void *(*)(void))dlsym(library, "OrtGetApiBase");
  return real();
}
