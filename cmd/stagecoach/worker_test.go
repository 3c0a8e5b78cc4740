package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

const workerHandler = `"""Says who it is."""
import os

import stagecoach as sc


@sc.each
def infer(state: sc.Model, call: sc.Call) -> str:
    print("asked", call.input.text())
    return f"{WHO} {os.getpid()}"
`

const workerStack = `version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  left: {lang: python3-stage, handler: ./left, image: "example/left:latest", fprocess: %[1]s ./stage, annotations: {stagecoach.dev/process: shared}}
  right: {lang: python3-stage, handler: ./right, image: "example/right:latest", fprocess: %[1]s ./stage, annotations: {stagecoach.dev/process: shared}}
  bad: {lang: python3-stage, handler: ./right, image: "example/right:latest", fprocess: %[1]s ./stage, annotations: {stagecoach.dev/process: shared, stagecoach.dev/start: cold}}
`

// TestSharedProcess has two functions that name one process. Their replicas run in that process,
// each with its own lines. When one function is removed, the other goes on.
func TestSharedProcess(t *testing.T) {
	t.Parallel()
	py := proctest.Python(t)
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	for _, who := range []string{"left", "right"} {
		if err := os.MkdirAll(filepath.Join(c.dir, who), 0o755); err != nil {
			t.Fatal(err)
		}
		c.write(who+"/handler.py", fmt.Sprintf("WHO = %q\n%s", who, workerHandler))
	}
	c.write("stack.yml", fmt.Sprintf(workerStack, py))
	c.run("", "", "build", "--images", images)
	c.refuse(`annotations\["stagecoach.dev/start"\]: got "cold", want auto beside stagecoach.dev/process`, "", "deploy", "--filter", "bad")
	for _, who := range []string{"left", "right"} {
		c.run(who+": ready with 1 replicas", "", "deploy", "--wait", "--filter", who)
	}
	left, right := strings.Fields(c.run(`^left \d+$`, "x", "invoke", "left")), strings.Fields(c.run(`^right \d+$`, "y", "invoke", "right"))
	if left[1] != right[1] {
		t.Errorf("processes %s and %s, want one", left[1], right[1])
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	var n node.Inventory
	if err := json.Unmarshal([]byte(c.run("", "", "node", "describe", host, "--json")), &n); err != nil {
		t.Fatal(err)
	}
	if len(n.Zygotes) != 1 || n.Zygotes[0].Worker != "shared" || n.Zygotes[0].Replicas != 2 || fmt.Sprint(n.Zygotes[0].PID) != left[1] {
		t.Errorf("zygotes %+v, want the worker of both", n.Zygotes)
	}
	if len(n.Replicas) != 2 || n.Replicas[0].Path != keysmanager.PathResident || n.Replicas[1].PID != n.Replicas[0].PID {
		t.Errorf("replicas %+v", n.Replicas)
	}
	c.run(`(?m)^worker shared, openfaas-fn +- +\S+ \S+ +2 +ready +resident`, "", "node", "describe", host)
	c.run(`resident`, "", "describe", "left")
	r.until(soon, "each line with its function", func() bool {
		out, err := c.try("", "logs", "left")
		return err == nil && strings.Contains(out, "asked x") && !strings.Contains(out, "asked y")
	})
	c.run("", "", "remove", "left")
	r.until(soon, "it to be gone", func() bool {
		out, err := c.try("", "node", "describe", host)
		return err == nil && !strings.Contains(out, "left.")
	})
	if again := strings.Fields(c.run(`^right \d+$`, "z", "invoke", "right")); again[1] != right[1] {
		t.Errorf("process %s, want %s", again[1], right[1])
	}
}
