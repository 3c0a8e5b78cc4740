package main

import (
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// rendered is a manifest of the Helm chart, with what this test reads.
type rendered struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		Template struct {
			Spec struct {
				InitContainers []renderedContainer `yaml:"initContainers"`
				Containers     []renderedContainer
			}
		}
	}
}

type renderedContainer struct {
	Name            string
	Args            []string
	SecurityContext struct {
		Privileged   bool
		Capabilities struct{ Add []string }
	} `yaml:"securityContext"`
}

// TestChartUsesFlagsThatExist reads the flags of the commands in the rendered examples of the Helm
// chart. It runs the commands that need no cluster.
func TestChartUsesFlagsThatExist(t *testing.T) {
	files, err := filepath.Glob("../../scripts/chart/testdata/golden/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatalf("examples %v, %v, want at least four", files, err)
	}
	for _, file := range files {
		ran := map[string]bool{}
		objects := readRendered(t, file)
		in := chartFolders(t, objects)
		for _, o := range objects {
			pod := o.Spec.Template.Spec
			for _, c := range append(pod.InitContainers, pod.Containers...) {
				if c.Name == "nats" { // another program
					continue
				}
				args := make([]string, 0, len(c.Args))
				for _, arg := range c.Args {
					args = append(args, in.Replace(arg))
				}
				ran[c.Name] = true
				if err := runChartCommand(t, args); err != nil {
					t.Errorf("%s: container %s of %s: %v: %v", file, c.Name, o.Metadata.Name, args, err)
				}
			}
		}
		if !ran["control"] || !ran["keysmanager"] || !ran["files"] && !strings.Contains(file, "external") {
			t.Errorf("%s: the commands of %v are checked, want all containers", file, ran)
		}
	}
}

// runChartCommand runs a command that needs no cluster, and reads the flags of all others.
func runChartCommand(t *testing.T, args []string) error {
	switch args[0] {
	case "up":
		_, _, err := upConfig(args[1:])
		return err
	case "keysmanager":
		c, err := readKeysManagerConfig(args[1:])
		if err == nil && (!c.pod || !c.tunnel.remote) {
			err = errors.New("it is no pod, or shares files with control planes")
		}
		return err
	case "cluster":
		if err := runCluster(t.Context(), args[1:], io.Discard); err != nil {
			return err
		}
		for _, arg := range args {
			if dir, ok := strings.CutPrefix(arg, "--dir="); ok {
				_, err := os.Stat(filepath.Join(dir, queue.OutsideConfig))
				return err
			}
		}
	}
	return errors.New("it is not checked")
}

func readRendered(t *testing.T, file string) (all []rendered) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := yaml.NewDecoder(f); ; {
		var o rendered
		if err := d.Decode(&o); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
}

// chartFolders writes what pods mount, and replaces the paths and the variables of pods in
// arguments.
func chartFolders(t *testing.T, objects []rendered) *strings.Replacer {
	t.Helper()
	dir := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o400)); err != nil {
			t.Fatal(err)
		}
	}
	// With nats.external, the key is not in the chart.
	key := "stagecoach-cluster-1." + base64.RawURLEncoding.EncodeToString(make([]byte, 32))
	for _, o := range objects {
		if config := o.Data["config.yaml"]; config != "" {
			write("config/config.yaml", config)
		}
		if text := o.Data["cluster.key"]; text != "" {
			b, err := base64.StdEncoding.DecodeString(text)
			if err != nil {
				t.Fatal(err)
			}
			key = string(b)
		}
	}
	write("cluster/cluster.key", key)
	write("auth/basic-auth-user", "admin")
	write("auth/basic-auth-password", "secret")
	write("registry/config.json", "{}")
	write("lib/libonnxruntime.so.1", "")
	write("usr/lib/stagecoach/libonnxruntime.so.1", "")
	pairs := []string{"$(POD_IP)", "10.0.0.7", "$(POD_NAME)", "y-nats-0", "$(NODE_NAME)", "worker-1"}
	for _, folder := range []string{"config", "cluster", "auth", "registry", "lib", "usr", "data", "state", "join"} {
		pairs = append(pairs, "=/"+folder, "="+filepath.Join(dir, folder))
	}
	return strings.NewReplacer(pairs...)
}
