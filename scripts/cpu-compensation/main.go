// Command cpu-compensation makes a real run in which a stage gets CPU instead of replicas. `make
// record-cpu` runs it.
//
// It starts `stagecoach up --record` with a budget of one replica, deploys a MiniLM stage with a
// quarter of a core, and profiles it. It then sends more than that serves, and later much less. The
// stage needs two replicas, and the budget keeps the second one from starting. The command prints
// what happened over time. Its exit status is 1 if no plan raised the quota, or if the stage is not
// faster afterwards.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// function is the name of the stage.
const function = "embed-text"

// declared is the CPU limit in stackFile, in thousandths of a core.
const declared = 250

const stackFile = `version: 1.0
provider: {name: openfaas}
functions:
  embed-text:
    image: stagecoach/minilm-encode:0.1.0
    environment: {STAGECOACH_MODEL: model/whole.onnx}
    labels: {com.openfaas.scale.min: "1", com.openfaas.scale.max: "4"}
    requests: {cpu: 250m}
    limits: {cpu: 250m}
    annotations:
      stagecoach.dev/network: none
      stagecoach.dev/pipeline: embed
      stagecoach.dev/slo: 2s
`

// sentence is repeated until the text has about the 256 tokens that the model reads.
const sentence = "the stage coach carries the mail and four passengers over the hills to the next town "

type options struct {
	binary, images, ort, corrector, keep string
	busy                                 float64 // arrivals of the busy phase, per declared capacity
	calm, most                           time.Duration
}

func main() {
	o := options{}
	flag.StringVar(&o.binary, "binary", "build/bin/stagecoach", "the stagecoach to run")
	flag.StringVar(&o.images, "images", "build/images", "folder with images")
	flag.StringVar(&o.ort, "ort", "build/ort/libonnxruntime.so.1", "ONNX Runtime's shared library")
	flag.StringVar(&o.corrector, "corrector", "quart", "the corrector of `up`; quart-no-cpu is the same without CPU")
	flag.StringVar(&o.keep, "keep", "", "file for a short gzipped record, which tests replay")
	flag.Float64Var(&o.busy, "busy", 1.15, "arrivals of the busy phase, as a part of what the declared quota serves")
	flag.DurationVar(&o.most, "for", 90*time.Second, "length of the busy phase")
	flag.DurationVar(&o.calm, "calm", 100*time.Second, "length of the calm phase at the end")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cpu-compensation:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "cpu-compensation-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	record := filepath.Join(dir, "record.jsonl")
	if err := drive(ctx, o, dir, record, out); err != nil {
		return err
	}
	lines, err := read(record, function)
	if err != nil {
		return err
	}
	show(out, lines)
	if o.keep != "" {
		if err := keep(lines, o.keep); err != nil {
			return err
		}
	}
	c, err := compensated(lines)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "\nquota: %dm before, %dm after; service: %v before, %v %v after the last raise\nwhy: %s\n",
		c.declared, c.quota, c.before.Round(time.Millisecond), c.after.Round(time.Millisecond), settled, c.why)
	return err
}

// drive makes the run.
func drive(ctx context.Context, o options, dir, record string, out io.Writer) (err error) {
	if o.binary, err = filepath.Abs(o.binary); err != nil { // commands run in dir
		return err
	}
	gateway, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	//nolint:gosec // the user's own binary
	up := exec.CommandContext(ctx, o.binary, "up", "--listen", gateway, "--state", filepath.Join(dir, "state"),
		"--images", o.images, "--ort", o.ort, "--budget", "1", "--corrector", o.corrector, "--record", record, "--log", "warn")
	up.Cancel = func() error { return up.Process.Signal(syscall.SIGTERM) }
	up.Stderr = os.Stderr
	if err := up.Start(); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, up.Process.Signal(syscall.SIGTERM), up.Wait())
	}()
	files := map[string]string{"stack.yml": stackFile, "text.txt": strings.Repeat(sentence, 15)}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	call := func(to io.Writer, args ...string) error {
		//nolint:gosec // as above
		c := exec.CommandContext(ctx, o.binary, append(args, "--gateway", "http://"+gateway)...)
		var said bytes.Buffer
		c.Dir, c.Stdout, c.Stderr = dir, to, &said
		if err := c.Run(); err != nil {
			return fmt.Errorf("stagecoach %s: %w\n%s", args[0], err, said.Bytes())
		}
		return nil
	}
	if err := listening(ctx, gateway); err != nil {
		return err
	}
	if err := call(io.Discard, "deploy", "-f", "stack.yml", "--wait"); err != nil {
		return err
	}
	service, err := measure(out, call)
	if err != nil {
		return err
	}
	busy := o.busy / service.Seconds()
	rate := fmt.Sprintf("%.2f:15s,%.2f:%v,%.2f:%v", 0.3*busy, busy, o.most, 0.1*busy, o.calm)
	fmt.Fprintf(out, "load: %s\n\n", rate)
	return call(out, "load", function, "--rate", rate, "--cv", "1", "--seed", "3", "--slo", "2s",
		"--body", "@text.txt", "--content-type", "text/plain", "--quiet", "--allow-errors")
}

// measure profiles the stage, and returns its service time with the declared quota. On a busy
// machine a profile may not show what CPU is worth, so it is then measured again, twice at most.
//
// It measures quotas of up to one core. The stage computes with one thread per core, and a second
// thread does not make texts of this length faster.
func measure(out io.Writer, call func(io.Writer, ...string) error) (time.Duration, error) {
	for try := 1; ; try++ {
		var text bytes.Buffer
		err := call(&text, "profile", function, "--cpu", "250m,500m,1", "--batch", "1",
			"--input", "text.txt", "--content-type", "text/plain", "--most", "60", "--json")
		if err != nil {
			return 0, err
		}
		means, err := profiled(text.Bytes())
		if err != nil {
			return 0, err
		}
		fmt.Fprintf(out, "profile: 250m %v, 500m %v, 1000m %v\n", means[250], means[500], means[1000])
		switch {
		case means[declared] > 0 && means[1000] <= means[declared]/2:
			return means[declared], nil
		case try == 3:
			return 0, fmt.Errorf("with %dm the stage takes %v, and with 1000m %v, want at most half: the machine has too much other work",
				declared, means[declared], means[1000])
		}
		time.Sleep(pause)
	}
}

// pause is how long a function must not have been called before it is profiled.
const pause = 3 * time.Second

// profiled returns the mean service time by quota, in thousandths of a core, of a profile in JSON.
func profiled(text []byte) (map[int]time.Duration, error) {
	var p struct {
		Points []struct {
			CPUMilli    int
			MeanSeconds float64
		}
	}
	if err := json.Unmarshal(text, &p); err != nil {
		return nil, fmt.Errorf("profile: %w", err)
	}
	means := map[int]time.Duration{}
	for _, point := range p.Points {
		means[point.CPUMilli] = time.Duration(point.MeanSeconds * float64(time.Second)).Round(time.Millisecond)
	}
	return means, nil
}

// freeAddress returns an address of this machine with a free port.
func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// listening waits until something listens on an address.
func listening(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err == nil {
			return c.Close()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nothing listens on %s: %w", address, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
