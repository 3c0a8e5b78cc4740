package watchdog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// maxOutput is the maximum size in bytes of an answer that is kept before it is sent.
const maxOutput = 64 << 20

// forker is a handler that runs one process per request.
type forker struct {
	c       *config
	runtime sandbox.Runtime
	log     *slog.Logger
}

func (f *forker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kills := f.c.oom.kills()
	var late timeoutError
	p, err := f.start(w, r)
	switch {
	case err == nil:
	case errors.As(err, &late):
		refuse(w, http.StatusGatewayTimeout, late.Error())
		return
	default:
		f.log.Error("the process of a request did not start", "error", err)
		refuse(w, http.StatusInternalServerError, f.c.hide(err.Error()))
		return
	}
	w.Header().Set("Content-Type", f.c.contentType)
	out := &answer{w: w}
	if f.c.mode == modeSerializing {
		out.kept = &bytes.Buffer{}
	}
	_, copied := io.Copy(out, p.stdout)
	if copied != nil {
		p.kill() // nobody takes the output
	}
	status := p.wait()
	why := fmt.Sprintf("the function's process ended with exit status %d", status.ExitStatus())
	code := http.StatusInternalServerError
	switch {
	case errors.As(context.Cause(r.Context()), &late):
		code, why = http.StatusGatewayTimeout, late.Error()
	case copied != nil:
		why = "the function's output: " + copied.Error()
	case status.Signaled():
		why = "the function's process was " + f.c.oom.why(status, kills)
	case status.ExitStatus() == 0:
		out.end()
		return
	}
	if last := p.stderr.LastError(); last != "" && !errors.As(context.Cause(r.Context()), &late) {
		why += ": " + last
	}
	if out.begun {
		f.log.Error("an answer was broken off", "error", why)
		panic(http.ErrAbortHandler) // the client must not take a part for the whole
	}
	refuse(w, code, f.c.hide(why))
}

// answer is the output of a process on its way to the client. It is sent at once, or kept until the
// process has succeeded.
type answer struct {
	w     http.ResponseWriter
	kept  *bytes.Buffer
	begun bool
}

func (a *answer) Write(b []byte) (int, error) {
	if a.kept == nil {
		a.begun = true
		n, err := a.w.Write(b)
		if err == nil {
			_ = http.NewResponseController(a.w).Flush() // on an error the next Write fails too
		}
		return n, err
	}
	if a.kept.Len()+len(b) > maxOutput {
		return 0, fmt.Errorf("more than %d bytes, want mode=%s for it", maxOutput, modeStreaming)
	}
	return a.kept.Write(b)
}

func (a *answer) end() {
	if a.kept != nil {
		a.w.Header().Set("Content-Length", strconv.Itoa(a.kept.Len()))
		_, _ = a.w.Write(a.kept.Bytes()) // fails if the client is gone
	}
}

// process is the process of one request.
type process struct {
	runs   sandbox.Process
	stdout *os.File
	stderr *sandbox.Output
	fed    chan struct{} // closed when nothing more will be written to its stdin
	// Closed when it and everything that it started have ended; then status is set.
	ended  chan struct{}
	status unix.WaitStatus
	hurry  func()      // ends a wait for the request's body
	stop   func() bool // stops the watch on the request's context
}

func (f *forker) start(w http.ResponseWriter, r *http.Request) (*process, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("stdin: %w", err)
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		_ = in.Close()
		return nil, fmt.Errorf("stdout: %w", err)
	}
	defer theirOut.Close()
	stderr, err := sandbox.NewOutput(func(_, line string) { fmt.Fprintln(os.Stderr, line) })
	if err != nil {
		_, _ = in.Close(), out.Close()
		return nil, err
	}
	command := f.c.command()
	command.Env = variables(command.Env, r)
	command.Stdin, command.Stdout, command.Stderr = theirIn, theirOut, stderr.Stderr
	runs, err := f.runtime.Start(r.Context(), command)
	stderr.Started()
	if err != nil {
		_, _ = in.Close(), out.Close()
		stderr.Abandon()
		return nil, err
	}
	killFirst(runs.PID())
	p := &process{runs: runs, stdout: out, stderr: stderr, fed: make(chan struct{}), ended: make(chan struct{})}
	// A body in memory needs no such end.
	p.hurry = func() { _ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) }
	p.stop = context.AfterFunc(r.Context(), p.kill)
	go func() { // wait waits for both goroutines
		p.status = runs.Wait()
		runs.Forget()
		close(p.ended)
	}()
	go func() {
		defer close(p.fed)
		_, _ = io.Copy(in, r.Body) // a process need not read all of it
		_ = in.Close()
	}()
	return p, nil
}

// kill kills the process and everything that it has started.
func (p *process) kill() { _ = p.runs.Signal(syscall.SIGKILL) } // it may have ended

// wait returns how the process ended, once nothing of it is left.
func (p *process) wait() unix.WaitStatus {
	<-p.ended
	p.stop()
	select {
	case <-p.fed:
	default:
		p.hurry()
		<-p.fed
	}
	_ = p.stdout.Close() // opened for reading only
	p.stderr.Finish(lastMoment)
	return p.status
}

// variables returns a process's environment, which describes its request as OpenFaaS's watchdogs
// do.
func variables(env map[string]string, r *http.Request) map[string]string {
	all := maps.Clone(env)
	for name, values := range r.Header {
		all["Http_"+strings.ReplaceAll(name, "-", "_")] = values[0]
	}
	path := r.URL.EscapedPath()
	if p, err := url.PathUnescape(path); err == nil {
		path = p
	}
	for name, value := range map[string]string{
		"Http_Method": r.Method, "Http_Path": path, "Http_Query": r.URL.RawQuery, "Http_Host": r.Host,
		"Http_ContentLength": strconv.FormatInt(r.ContentLength, 10), "Http_Content_Length": strconv.FormatInt(r.ContentLength, 10),
		"Http_Transfer_Encoding": strings.Join(r.TransferEncoding, ","),
	} {
		if value != "" {
			all[name] = value
		}
	}
	for name, value := range all {
		if strings.ContainsRune(value, 0) {
			delete(all, name) // an environment cannot contain NULs
		}
	}
	return all
}
