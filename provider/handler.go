package provider

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// FailureAnnotation is the annotation that says when and why a replica last failed, and has its
// last lines; " | " separates these parts. It is made and dropped like [StatusAnnotation].
const FailureAnnotation = pipeline.Prefix + "last-failure"

// lastLines is how many lines of a failed replica are shown.
const lastLines = 5

// lastFailure returns when and why a replica of a function last failed, and what it printed last;
// "" if none has failed.
func (p *Provider) lastFailure(ctx context.Context, key pipeline.Key) string {
	f := p.Status.State(key).Failure
	if f.Replica == "" {
		return ""
	}
	parts := []string{fmt.Sprintf("%s %s %s: %s", f.At.UTC().Format(time.RFC3339), f.Replica, f.Kind, f.Cause)}
	reader := p.Logs.Read(LogQuery{Key: key, Replica: f.Replica, Tail: lastLines})
	defer reader.Close()
	for {
		lines, _, err := reader.Read(ctx)
		if err != nil { // there are no more, or the client is gone
			break
		}
		for _, l := range lines {
			parts = append(parts, l.Text)
		}
	}
	for i, text := range parts {
		parts[i] = oneLine(text)
	}
	return strings.Join(parts, " | ")
}

// checkMode refuses a mode that the watchdog does not have. A stage may give the variable any other
// meaning.
func (p *Provider) checkMode(d types.FunctionDeployment, digest string) error {
	const want = "http, streaming, serializing or static"
	mode := d.EnvVars["mode"]
	switch mode {
	case "", "http", "streaming", "serializing", "static":
		return nil
	case "afterburn":
		return &pipeline.FieldError{Path: "envVars.mode", Got: quote(mode), Want: want + "; of-watchdog has removed afterburn: let the program serve HTTP, in mode http"}
	}
	if p.Images.Stage(d.Image, digest) {
		return nil
	}
	return &pipeline.FieldError{Path: "envVars.mode", Got: quote(mode), Want: want}
}
