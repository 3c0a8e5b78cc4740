package main

import (
	"encoding/json"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestDoctorLooksAtTheControlPlane runs the command against real NATS: without a control plane,
// with a wrong token, and with a control plane of this and of another release.
func TestDoctorLooksAtTheControlPlane(t *testing.T) {
	folder, files := t.TempDir(), map[string]string{}
	authorityOf := func(name string) queue.ServerConfig {
		cfg := defaultConfig()
		cfg.State, cfg.NATS.Listen = t.TempDir(), "127.0.0.1:0"
		server := queue.ServerConfig{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}
		if err := new(nodes).openAuthority(cfg, &server); err != nil {
			t.Fatal(err)
		}
		files[name] = tokenFile(cfg.State)
		return server
	}
	s, err := queue.StartServer(authorityOf("secret"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	authorityOf("wrong")
	token := func(name string) string { return files[name] }
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	type diagnosis struct{ Check, State, Found, ToDo string }
	look := func(args ...string) ([]diagnosis, error) {
		t.Helper()
		var out strings.Builder
		err := run(t.Context(), append([]string{"doctor", "--node", "-o", "json", "--state", folder, "--join", s.URL()}, args...), &out)
		var all []diagnosis
		if err := json.Unmarshal([]byte(out.String()), &all); err != nil {
			t.Fatalf("%v\n%s", err, out.String())
		}
		return all, err
	}
	find := func(all []diagnosis, check string) string {
		i := slices.IndexFunc(all, func(d diagnosis) bool { return d.Check == check })
		if i < 0 {
			return "no such check"
		}
		return all[i].State + ": " + all[i].Found + "; " + all[i].ToDo
	}
	expect := func(all []diagnosis, check, want string) {
		t.Helper()
		if got := find(all, check); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", check, got, want)
		}
	}
	all, err := look("--nats-token", token("secret"), "--listen", taken.Addr().String())
	if err == nil || !strings.Contains(err.Error(), "checks failed") {
		t.Errorf("without a control plane: %v", err)
	}
	expect(all, "NATS", "ok: 127.0.0.1:")
	expect(all, "control plane", "missing: 127.0.0.1:")
	expect(all, "port", "missing: listen tcp "+taken.Addr().String()+": bind: address already in use; choose another port")
	all, _ = look("--nats-token", token("wrong"))
	if got := find(all, "control plane"); !strings.Contains(got, "the NATS server is control") {
		t.Errorf("wrong token: %q", got)
	}
	all, _ = look("--nats-token", filepath.Join(folder, "none"))
	expect(all, "token", "missing: open "+folder)
	all, _ = look("--join", "nats://"+taken.Addr().String()+",oops", "--nats-token", token("secret"))
	expect(all, "NATS", "ok: ") // the first address answers
	all, _ = look("--join", "nats://127.0.0.1:1")
	expect(all, "NATS", "missing: dial tcp 127.0.0.1:1: connect: connection refused; start `stagecoach up --nats-listen` there")

	nc, err := s.Connect("up")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	d, err := node.OpenDirectory(node.DirectoryConfig{Bus: queue.NewJoinLink(nc), Boot: "b", Version: version(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	all, _ = look("--nats-token", token("secret"), "--listen", "127.0.0.1:0")
	expect(all, "control plane", "ok: version "+version()+", as this program")
	expect(all, "clock", "ok: ")
	expect(all, "port", "ok: 127.0.0.1:0 is free")
}
