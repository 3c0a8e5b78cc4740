// The C side of package zygote: sessions of ONNX Runtime (session.c), pre-packed models in files
// (prepacked.c) and in memory (mapped.c), and the constructor that makes a stage binary a zygote
// (zygote.c). Unless its comment says otherwise, a function that returns char * returns NULL for
// success, or an error message that the caller frees.
#ifndef STAGECOACH_ZYGOTE_H
#define STAGECOACH_ZYGOTE_H

#include <stddef.h>
#include <stdint.h>

struct OrtSession;
struct OrtValue;

enum { SC_MAX_RANK = 16, SC_MAX_THREADS = 256 };

// sc_tensor describes a model's input or output, without data; a dim of -1 means any length. It
// also carries an input or output through sc_run.
typedef struct {
  const char *name; // C memory
  int32_t type;     // ONNXTensorElementDataType
  int32_t rank;     // -1 for a model's input or output of unknown rank
  int64_t dims[SC_MAX_RANK];
  const void *data;
  size_t bytes; // of data, for inputs
  struct OrtValue *value;
} sc_tensor;

// sc_session is a loaded model.
typedef struct {
  struct OrtSession *ort;
  char *model;    // the path that was asked for
  int prepacked;  // its weights are mapped
  struct sc_threads *pool;
  sc_tensor *inputs, *outputs;
  size_t n_inputs, n_outputs;
} sc_session;

// sc_options says how to load a model.
typedef struct {
  const char *model; // the file
  int threads;       // intra-op threads, the calling thread included
  int as_is;         // the file is already optimised
  const char *write; // if not NULL, also write the optimised model to this file,
  const char *weights; // and its pre-packed weights to this file, a name in the same folder
} sc_options;

// sc_load opens ONNX Runtime's library, once per process. If version is not NULL, it gets the
// library's version text.
char *sc_load(const char *library, const char **version);

// sc_open loads a model. It records the starts of its pool's threads; see sc_start_threads.
char *sc_open(const sc_options *options, sc_session **session);

// sc_open_prepacked loads a model from its pre-packed form in the folder parent. If the form is
// missing and may_write is true, it first writes the form; only a process with one thread may do
// that. It returns NULL if parent is NULL or empty, if there is no form, or after an error, which
// it prints to stderr.
sc_session *sc_open_prepacked(const char *parent, const char *version, const sc_options *plain, int may_write);

// sc_pack writes the pre-packed form of the model plain->model to the empty files at the
// descriptors SC_GRAPH_FD and SC_WEIGHTS_FD. sc_open_mapped loads the model from these files; it
// uses plain->model only as the name in messages.
enum { SC_GRAPH_FD = 4, SC_WEIGHTS_FD = 5 };
char *sc_pack(const sc_options *plain);
char *sc_open_mapped(const sc_options *plain, sc_session **session);

// sc_run runs the model. Several threads may call it. On success, it sets type, rank, dims and data
// of each element of out, and the caller calls sc_release.
char *sc_run(sc_session *session, size_t n_in, sc_tensor *in, size_t n_out, sc_tensor *out);
void sc_release(size_t n_out, sc_tensor *out);

// sc_close frees the session and ends its pool's threads.
void sc_close(sc_session *session);

// sc_recorded returns the number of threads of the session's pool. sc_start_threads starts threads
// of the pool until n threads run, or all of them if there are fewer. If running is not NULL, it
// gets the number of running threads.
int sc_recorded(const sc_session *session);
char *sc_start_threads(sc_session *session, int n, int *running);

// sc_message formats a message that the caller frees.
char *sc_message(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The state of a forked child: its stage socket (-1: this process is no child), the environment
// from its begin order, and the session that it inherits from the zygote (NULL: none).
extern int sc_child_fd;
extern const char *sc_child_env;
extern size_t sc_child_env_bytes;
extern sc_session *sc_inherited;

#endif
