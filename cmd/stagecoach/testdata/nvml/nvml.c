// A fake of NVIDIA's NVML library for tests, with two GPUs of 10 GiB each. Files in the folder
// FAKE_NVML control it:
// - While there is a file with the index of a GPU as its name, that GPU is lost.
// - While there is a file "filling", the used memory grows by 1 MiB each time that it is asked for.
// The fake lacks the functions that an old driver lacks.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, SMALL = 7, LOST = 15, GPUS = 2 };

typedef struct { unsigned version; unsigned long long total, reserved, available, used; } memory;
typedef struct { unsigned gpu, memory; } rates;

static int state(void *device) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%d", getenv("FAKE_NVML"), (int)(size_t)device - 1);
  return access(path, F_OK) == 0 ? LOST : SUCCESS;
}

static unsigned long long used(void) {
  static unsigned long long bytes;
  char path[4096];
  snprintf(path, sizeof path, "%s/filling", getenv("FAKE_NVML"));
  return access(path, F_OK) == 0 ? bytes += 1 << 20 : 0;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == LOST ? "GPU is lost" : "error"; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index >= GPUS) return INVALID;
  *device = (void *)(size_t)(index + 1);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
  if (state(device) != SUCCESS) return LOST;
  snprintf(uuid, size, "GPU-0000000%d-aaaa", (int)(size_t)device - 1);
  return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  snprintf(name, size, "Fake GPU");
  return state(device);
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory *m) {
  m->total = 11ull << 30, m->reserved = 1ull << 30, m->used = used(), m->available = (10ull << 30) - m->used;
  return state(device);
}

int nvmlDeviceGetUtilizationRates(void *device, rates *r) {
  r->gpu = 25, r->memory = 0;
  return state(device);
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
  (void)sensor;
  *celsius = 41;
  return state(device);
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
  *milliwatts = 61500;
  return state(device);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
  (void)processes;
  *count = 0;
  return state(device);
}

int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
  (void)type, (void)counter, (void)count;
  return state(device) == SUCCESS ? NOT_SUPPORTED : LOST;
}

int nvmlEventSetCreate(void **set) { (void)set; return NOT_SUPPORTED; }
