package stage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
)

// errByHand is the error of a process without a stage socket.
var errByHand = errors.New("this is a stage of a Stagecoach pipeline, and it was started without a stage socket: " +
	"deploy it (faas-cli deploy) and let `stagecoach up` start it")

// Main runs this process as a replica and does not return. The exit status is 0 if the replica was
// drained or its dispatcher has gone, 2 if the process was started by hand, and 1 otherwise.
func Main(h Hooks) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := Run(ctx, h)
	stop()
	switch {
	case errors.Is(err, errByHand):
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "stage:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Run runs this process as a replica, as [Main] does, but returns when the replica has ended. A
// replica ends when:
//   - the dispatcher has drained it
//   - the dispatcher has gone
//   - ctx has ended, and all accepted calls are answered
//
// Call Run at most once per process.
func Run(ctx context.Context, h Hooks) error {
	fd, err := stageSocket()
	if err != nil {
		return err
	}
	c, err := connection(fd)
	if err != nil {
		return err
	}
	defer c.Close()
	if h.Infer == nil {
		return errors.New("Hooks.Infer is nil, want a function")
	}
	if h.Slots, h.MaxBatch, err = limits(h, os.Getenv("max_inflight")); err != nil {
		return err
	}
	if h.timeout, err = Duration("exec_timeout", os.Getenv("exec_timeout")); err != nil {
		return err
	}
	h.once = os.Getenv(wire.EnvIdempotent) == "false"
	r := &Replica{
		Name: os.Getenv(wire.EnvReplica), Function: os.Getenv(wire.EnvFunction),
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	threads, err := r.open()
	if err != nil {
		return err
	}
	if r.model != nil {
		h.threads = r.addThreads
	}
	begin := time.Now()
	if h.Place != nil {
		if err := h.Place(ctx, r); err != nil {
			return fmt.Errorf("place: %w", onDevice(err))
		}
	}
	return serve(ctx, wire.NewConn(c), wire.Hello{
		Oldest: wire.OldestVersion, Newest: wire.Version, PID: os.Getpid(), Function: r.Function, Replica: r.Name,
		Slots: h.Slots, MaxBatch: h.MaxBatch, Threads: threads, Load: r.load, Place: time.Since(begin),
	}, h, r.Log)
}

// onDevice adds the names of the replica's devices to an error of Place that is marked as
// OutOfMemory, so that the platform can read them.
func onDevice(err error) error {
	if code(err) != task.OutOfMemory {
		return err
	}
	return fmt.Errorf("%s%s: %w", wire.OutOfMemoryOn, os.Getenv(envDevices), err)
}

// stageSocket returns the descriptor of the stage socket. In a forked child, it also copies the
// environment of the fork order into Go's environment.
func stageSocket() (int, error) {
	if fd, env, ok := zygote.Child(); ok {
		for _, kv := range env {
			k, v, _ := strings.Cut(kv, "=")
			if err := os.Setenv(k, v); err != nil {
				return 0, fmt.Errorf("environment of the fork order: %q: %w", kv, err)
			}
		}
		return fd, nil
	}
	s := os.Getenv(wire.EnvStageFD)
	if s == "" {
		return 0, errByHand
	}
	fd, err := strconv.Atoi(s)
	if err != nil || fd < 3 {
		return 0, fmt.Errorf("%s=%q, want a descriptor from 3 on", wire.EnvStageFD, s)
	}
	return fd, nil
}

// connection returns the stage socket's connection, which replaces the descriptor.
func connection(fd int) (wire.Socket, error) {
	f := os.NewFile(uintptr(fd), "stage")
	defer f.Close() // the socket has its own descriptor
	c, err := wire.OpenSocket(f)
	if err != nil {
		return nil, fmt.Errorf("stage socket %d: %w", fd, err)
	}
	return c, nil
}

// limits returns the number of slots and the maximum batch size: the numbers of the hooks, or 1.
// The environment overrides the number of slots.
func limits(h Hooks, maxInflight string) (slots, batch int, err error) {
	slots = max(1, h.Slots)
	if maxInflight != "" && maxInflight != "0" {
		if slots, err = strconv.Atoi(maxInflight); err != nil || slots < 1 || slots > 10_000 {
			return 0, 0, fmt.Errorf("max_inflight=%q, want 1 to 10000, or 0 for the function's own", maxInflight)
		}
	}
	return slots, max(1, h.MaxBatch), nil
}

// Duration parses the value of an environment variable with a time in OpenFaaS's notation: seconds,
// or a Go duration. Empty and 0 mean none.
func Duration(name, value string) (time.Duration, error) {
	if value == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(value)
	if n, e := strconv.ParseUint(value, 10, 31); e == nil {
		d, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%s=%q, want seconds or a duration such as 400ms", name, value)
	}
	return d, nil
}

// open sets the replica's model: the session that the process has inherited, or else a new one. It
// returns the number of threads that compute.
func (r *Replica) open() (threads int, err error) {
	if r.model = zygote.Inherited(); r.model != nil {
		return r.model.AddThreads(1)
	}
	threads = runtime.GOMAXPROCS(0)
	model := os.Getenv(wire.EnvModel)
	if _, _, forked := zygote.Child(); forked || model == "" {
		return threads, nil
	}
	o := zygote.Options{
		Library: os.Getenv(wire.EnvORT), Model: model, Prepacked: os.Getenv(wire.EnvPrepacked), Mapped: os.Getenv(wire.EnvMapped) != "",
	}
	if o.Threads, err = number(wire.EnvPoolThreads, threads); err != nil {
		return 0, err
	}
	if o.Start, err = number(wire.EnvThreads, o.Threads); err != nil {
		return 0, err
	}
	begin := time.Now()
	if r.model, err = zygote.Open(o); err != nil {
		return 0, err
	}
	r.load = time.Since(begin)
	return r.model.AddThreads(1)
}

// addThreads makes more threads compute the model.
func (r *Replica) addThreads(total int) {
	if _, err := r.model.AddThreads(total); err != nil {
		r.Log.Warn("more threads for the model could not be started; the replica continues with those that it has", "wanted", total, "error", err)
	}
}

// number parses an environment variable with a number of threads. If the variable is not set,
// number returns its second argument.
func number(name string, otherwise int) (int, error) {
	text := os.Getenv(name)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%s=%q, want a number from 1 on", name, text)
	}
	return n, nil
}
