// Sessions of ONNX Runtime over its C API. The library is opened at run time, so that a stage
// binary links without it.
#define _GNU_SOURCE
#include "zygote.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onnxruntime_c_api.h"

static const OrtApi *api;
static OrtEnv *env;
static OrtMemoryInfo *memory;

char *sc_message(const char *format, ...) {
  char *text = NULL;
  va_list args;
  va_start(args, format);
  if (vasprintf(&text, format, args) < 0) text = strdup("out of memory");
  va_end(args);
  return text;
}

// message returns the text of a status, or NULL for success.
static char *message(OrtStatus *status) {
  if (!status) return NULL;
  char *text = strdup(api->GetErrorMessage(status));
  api->ReleaseStatus(status);
  return text;
}

#define TRY(call)                                \
  do {                                           \
    if ((err = message(call)) != NULL) goto end; \
  } while (0)

static char *load(const char *library, const char **version) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 1);
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return sc_message("open ONNX Runtime: %s", dlerror());
  const OrtApiBase *(*base)(void) = (const OrtApiBase *(*)(void))dlsym(handle, "OrtGetApiBase");
  if (!base) return sc_message("%s: no OrtGetApiBase in it, want the library of ONNX Runtime 1.24", library);
  const OrtApi *found = base()->GetApi(ORT_API_VERSION);
  *version = base()->GetVersionString();
  if (!found) return sc_message("%s: ONNX Runtime %s, want 1.%d or later", library, *version, ORT_API_VERSION);
  api = found;
  char *err;
  TRY(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "stagecoach", &env));
  TRY(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
end:
  return err;
}

char *sc_load(const char *library, const char **version) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static char *loaded;
  static const char *text;
  char *err = NULL;
  pthread_mutex_lock(&lock);
  if (loaded && strcmp(loaded, library) != 0) {
    err = sc_message("ONNX Runtime is %s in this process, want %s: one library a process", loaded, library);
  } else if (!loaded && (err = load(library, &text)) == NULL) {
    loaded = strdup(library);
  }
  if (version) *version = text;
  pthread_mutex_unlock(&lock);
  return err;
}

// A recorded start of a thread of a session's pool.
struct thread {
  OrtThreadWorkerFn work;
  void *argument;
  pthread_t id;
  int started;
};

struct sc_threads {
  pthread_mutex_t lock; // protects starts
  int recorded, started;
  struct thread all[SC_MAX_THREADS];
};

static OrtCustomThreadHandle record(void *pool, OrtThreadWorkerFn work, void *argument) {
  struct sc_threads *p = pool;
  if (p->recorded == SC_MAX_THREADS) return NULL; // ONNX Runtime reports an error
  p->all[p->recorded] = (struct thread){.work = work, .argument = argument};
  return (OrtCustomThreadHandle)&p->all[p->recorded++];
}

static void join(OrtCustomThreadHandle handle) {
  struct thread *t = (struct thread *)handle;
  if (t->started) pthread_join(t->id, NULL);
}

static void *run_thread(void *argument) {
  struct thread *t = argument;
  pthread_setname_np(pthread_self(), "ort-pool");
  t->work(t->argument);
  return NULL;
}

int sc_recorded(const sc_session *s) { return s ? s->pool->recorded : 0; }

// The threads block all signals, because signals are handled by the Go runtime.
char *sc_start_threads(sc_session *s, int n, int *running) {
  struct sc_threads *p = s->pool;
  sigset_t all, before;
  sigfillset(&all);
  pthread_mutex_lock(&p->lock);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int err = 0;
  while (p->started < n && p->started < p->recorded && err == 0) {
    struct thread *t = &p->all[p->started];
    err = pthread_create(&t->id, NULL, run_thread, t);
    t->started = err == 0;
    p->started += t->started;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (running) *running = p->started;
  pthread_mutex_unlock(&p->lock);
  return err == 0 ? NULL : sc_message("start %d pool threads: %s", n, strerror(err));
}

static char *configure(OrtSessionOptions *to, const sc_options *from, struct sc_threads *pool) {
  char *err;
  TRY(api->SetIntraOpNumThreads(to, from->threads));
  TRY(api->SetInterOpNumThreads(to, 1));
  TRY(api->SetSessionGraphOptimizationLevel(to, from->as_is ? ORT_DISABLE_ALL : ORT_ENABLE_ALL));
  TRY(api->AddSessionConfigEntry(to, "session.intra_op.allow_spinning", "0"));
  TRY(api->SessionOptionsSetCustomCreateThreadFn(to, record));
  TRY(api->SessionOptionsSetCustomThreadCreationOptions(to, pool));
  TRY(api->SessionOptionsSetCustomJoinThreadFn(to, join));
  if (from->write) {
    TRY(api->SetOptimizedModelFilePath(to, from->write));
    TRY(api->AddSessionConfigEntry(to, "session.optimized_model_external_initializers_file_name", from->weights));
    TRY(api->AddSessionConfigEntry(to, "session.save_external_prepacked_constant_initializers", "1"));
    // ONNX Runtime aligns only weights above 1 MiB in the file. Kernels that load aligned vectors,
    // such as those of the recogniser of PP-OCRv4, crash on smaller weights if these are mapped. So
    // smaller weights stay in the model, and are loaded into the heap.
    TRY(api->AddSessionConfigEntry(to, "session.optimized_model_external_initializers_min_size_in_bytes", "1048577"));
  }
end:
  return err;
}

// describe sets type and shape of an input or output.
static char *describe(OrtTypeInfo *info, sc_tensor *t) {
  const OrtTensorTypeAndShapeInfo *tensor = NULL;
  ONNXTensorElementDataType type;
  enum ONNXType kind;
  size_t rank;
  char *err;
  TRY(api->GetOnnxTypeFromTypeInfo(info, &kind));
  if (kind == ONNX_TYPE_SEQUENCE || kind == ONNX_TYPE_MAP) {
    err = sc_message("%s is a %s, want a tensor: classifiers of skl2onnx have tensors with "
                     "to_onnx(..., options={\"zipmap\": False}), those of onnxmltools with zipmap=False",
                     t->name, kind == ONNX_TYPE_MAP ? "map" : "sequence");
    goto end;
  }
  if (kind != ONNX_TYPE_TENSOR) {
    err = sc_message("%s is no tensor: only models whose inputs and outputs are tensors can be served", t->name);
    goto end;
  }
  TRY(api->CastTypeInfoToTensorInfo(info, &tensor));
  TRY(api->GetTensorElementType(tensor, &type));
  TRY(api->GetDimensionsCount(tensor, &rank));
  if (rank > SC_MAX_RANK) {
    err = sc_message("%s has %zu dimensions, want at most %d", t->name, rank, SC_MAX_RANK);
    goto end;
  }
  TRY(api->GetDimensions(tensor, t->dims, rank));
  t->type = (int32_t)type;
  t->rank = api->TensorTypeAndShape_HasShape(tensor) ? (int32_t)rank : -1;
end:
  return err;
}

static char *describe_all(sc_session *s) {
  OrtAllocator *allocator;
  char *err;
  TRY(api->GetAllocatorWithDefaultOptions(&allocator));
  TRY(api->SessionGetInputCount(s->ort, &s->n_inputs));
  TRY(api->SessionGetOutputCount(s->ort, &s->n_outputs));
  s->inputs = calloc(s->n_inputs + 1, sizeof *s->inputs);
  s->outputs = calloc(s->n_outputs + 1, sizeof *s->outputs);
  for (size_t i = 0; i < s->n_inputs + s->n_outputs; i++) {
    int in = i < s->n_inputs;
    size_t k = in ? i : i - s->n_inputs;
    sc_tensor *t = in ? &s->inputs[k] : &s->outputs[k];
    char *name;
    OrtTypeInfo *info;
    TRY((in ? api->SessionGetInputName : api->SessionGetOutputName)(s->ort, k, allocator, &name));
    t->name = name;
    TRY((in ? api->SessionGetInputTypeInfo : api->SessionGetOutputTypeInfo)(s->ort, k, &info));
    err = describe(info, t);
    api->ReleaseTypeInfo(info);
    if (err) goto end;
  }
end:
  return err;
}

char *sc_open(const sc_options *options, sc_session **session) {
  sc_session *s = calloc(1, sizeof *s);
  OrtSessionOptions *o = NULL;
  char *err;
  s->model = strdup(options->model);
  s->pool = calloc(1, sizeof *s->pool);
  pthread_mutex_init(&s->pool->lock, NULL);
  TRY(api->CreateSessionOptions(&o));
  if ((err = configure(o, options, s->pool)) != NULL) goto end;
  TRY(api->CreateSession(env, options->model, o, &s->ort));
  if ((err = describe_all(s)) != NULL) goto end;
  *session = s;
end:
  if (o) api->ReleaseSessionOptions(o);
  if (err) sc_close(s);
  return err;
}

static void free_all(sc_tensor *t, size_t n) {
  OrtAllocator *allocator;
  OrtStatus *status = api->GetAllocatorWithDefaultOptions(&allocator);
  if (status) return api->ReleaseStatus(status);
  for (size_t i = 0; t && i < n; i++) {
    if (t[i].name) allocator->Free(allocator, (void *)t[i].name);
  }
  free(t);
}

void sc_close(sc_session *s) {
  free_all(s->inputs, s->n_inputs);
  free_all(s->outputs, s->n_outputs);
  if (s->ort) api->ReleaseSession(s->ort);
  free(s->pool); // its threads have been joined
  free(s->model);
  free(s);
}

// describe_output sets an output's type, shape and data.
static char *describe_output(sc_tensor *t) {
  OrtTensorTypeAndShapeInfo *info = NULL;
  ONNXTensorElementDataType type;
  size_t rank;
  void *data;
  char *err;
  TRY(api->GetTensorTypeAndShape(t->value, &info));
  TRY(api->GetTensorElementType(info, &type));
  TRY(api->GetDimensionsCount(info, &rank));
  if (rank > SC_MAX_RANK) {
    err = sc_message("output %s has %zu dimensions, want at most %d", t->name, rank, SC_MAX_RANK);
    goto end;
  }
  TRY(api->GetDimensions(info, t->dims, rank));
  TRY(api->GetTensorMutableData(t->value, &data));
  t->type = (int32_t)type;
  t->rank = (int32_t)rank;
  t->data = data;
end:
  if (info) api->ReleaseTensorTypeAndShapeInfo(info);
  return err;
}

char *sc_run(sc_session *s, size_t n_in, sc_tensor *in, size_t n_out, sc_tensor *out) {
  static int64_t nothing;
  const char *names[n_in + n_out];
  OrtValue *values[n_in + n_out];
  char *err = NULL;
  memset(values, 0, sizeof values);
  for (size_t i = 0; i < n_in; i++) {
    void *data = in[i].bytes ? (void *)in[i].data : &nothing;
    names[i] = in[i].name;
    TRY(api->CreateTensorWithDataAsOrtValue(memory, data, in[i].bytes, in[i].dims, (size_t)in[i].rank,
                                            (ONNXTensorElementDataType)in[i].type, &values[i]));
  }
  for (size_t i = 0; i < n_out; i++) names[n_in + i] = out[i].name;
  TRY(api->Run(s->ort, NULL, names, (const OrtValue *const *)values, n_in, names + n_in, n_out, values + n_in));
  for (size_t i = 0; i < n_out; i++) {
    out[i].value = values[n_in + i];
    values[n_in + i] = NULL;
  }
  for (size_t i = 0; i < n_out && !err; i++) err = describe_output(&out[i]);
end:
  for (size_t i = 0; i < n_in + n_out; i++) {
    if (values[i]) api->ReleaseValue(values[i]);
  }
  if (err) sc_release(n_out, out);
  return err;
}

void sc_release(size_t n, sc_tensor *out) {
  for (size_t i = 0; i < n; i++) {
    if (out[i].value) api->ReleaseValue(out[i].value);
    out[i].value = NULL;
  }
}
