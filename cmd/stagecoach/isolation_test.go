package main

import (
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
}

// who returns a process's user and group. It checks that the process has no more rights than these,
// gains none, and cannot be inspected by other processes of its user.
func who(t *testing.T, pid int) (uid, gid int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.Fields(value)
	}
	for name, want := range map[string]string{"NoNewPrivs": "1", "CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapAmb": "0000000000000000", "Groups": ""} {
		if got := strings.Join(fields[name], " "); got != want {
			t.Errorf("process %d: %s is %q, want %q", pid, name, got, want)
		}
	}
	if info, err := os.Stat(fmt.Sprintf("/proc/%d/fd", pid)); err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("process %d: others of its user may look into it (%v)", pid, err)
	}
	id := func(name string) int {
		all := fields[name]
		if len(slices.Compact(slices.Clone(all))) != 1 {
			t.Errorf("process %d: %s %q, want the same four times", pid, name, all)
		}
		n, err := strconv.Atoi(all[0])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return id("Uid"), id("Gid")
}

// TestReplicasAreUsersOfTheirOwn checks that each zygote runs with its replicas as a separate user,
// in a group of its own. None of these users can change the files that zygotes map.
func TestReplicasAreUsersOfTheirOwn(t *testing.T) {
	needRoot(t)
	t.Parallel()
	r := start(t)
	users := map[int]string{}
	for _, f := range []struct{ name, namespace, image string }{
		{"a", "openfaas-fn", "noop"}, {"b", "openfaas-fn", "wait"}, {"a", "other", "ocr-text"}, {"b", "other", "ocr-recognise"},
	} {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(
			`{"service":%q,"namespace":%q,"image":"stagecoach/%s:0.1.0","envVars":%s,"labels":{"com.openfaas.scale.min":"1"}}`, f.name, f.namespace, f.image,
			map[bool]string{true: `{"STAGECOACH_MODEL":"model/rec.onnx"}`, false: `{}`}[f.image == "wait" || f.image == "ocr-recognise"]))
		r.until(late, "a replica of "+f.image, func() bool { return r.shows(f.name+"?namespace="+f.namespace).AvailableReplicas == 1 })
		pids := r.pids(f.image, false)
		if len(pids) != 1 {
			t.Fatalf("%d replicas of %s", len(pids), f.image)
		}
		uid, gid := who(t, pids[0])
		if other := users[uid]; other != "" || !within(uid) || gid != uid {
			t.Errorf("%s runs as %d:%d, %q as the same user; want one of %v, and its group", f.image, uid, gid, other, sandbox.DefaultRange)
		}
		users[uid] = f.image
		for _, z := range r.pids(f.image, true) {
			if zuid, zgid := who(t, z); zuid != uid || zgid != gid {
				t.Errorf("zygote of %s runs as %d:%d, its replica as %d:%d", f.image, zuid, zgid, uid, gid)
			}
		}
	}
	weights := 0
	if err := filepath.WalkDir(filepath.Join(r.state, "cache"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		weights++
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 0 || info.Mode() != 0o444 {
			t.Errorf("%s: %v of user %d, want it to be nobody's to change", path, info.Mode(), st.Uid)
		}
		return nil
	}); err != nil || weights == 0 {
		t.Errorf("%d files are packed: %v", weights, err)
	}
}

func within(n int) bool { return n >= sandbox.DefaultRange.First && n <= sandbox.DefaultRange.Last }

// TestAHostileFunction sends attacks to a function that runs whatever it gets.
func TestAHostileFunction(t *testing.T) {
	needRoot(t)
	t.Parallel()
	r := start(t, "--nats-listen", "127.0.0.1:0")
	r.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"key","value":"of-the-victim"}`)
	r.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"key","namespace":"hostile","value":"its-own"}`)
	r.must(http.StatusAccepted, http.MethodPost, "/system/functions", `{"service":"victim","image":"stagecoach/noop:0.1.0","secrets":["key"],"labels":{"com.openfaas.scale.max":"1"}}`)
	r.must(http.StatusAccepted, http.MethodPost, "/system/functions", `{"service":"shell","namespace":"hostile","image":"stagecoach/echo-http:0.1.0",
		"envProcess":"/bin/sh","envVars":{"mode":"streaming","exec_timeout":"60s"},"secrets":["key"],"labels":{"com.openfaas.scale.max":"1"}}`)
	r.must(http.StatusOK, http.MethodPost, "/function/victim", "x")
	victims := r.pids("noop", false)
	if len(victims) != 1 {
		t.Fatalf("%d replicas of the victim", len(victims))
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", victims[0]))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(env), "secret_mount_path=")
	mount, _, _ := strings.Cut(rest, "\x00")
	image, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", victims[0]))
	if err != nil || mount == "" {
		t.Fatalf("mount %q, image %q, %v", mount, image, err)
	}
	run := func(script string) string {
		t.Helper()
		return string(r.must(http.StatusOK, http.MethodPost, "/function/shell.hostile", script+"\nexit 0\n").Body)
	}
	if got := run(`cat "$secret_mount_path/key"; id -u; id -G; stat -c ' %a' "$HOME"; touch "$TMPDIR/x" && echo wrote`); !strings.HasPrefix(got, "its-own") || !strings.HasSuffix(got, " 1777\nwrote\n") {
		t.Errorf("what it may do: %q", got)
	}
	for attack, denied := range map[string]string{
		"cat " + mount + "/key 2>&1":                             "No such file",
		"ls " + filepath.Dir(mount) + " 2>&1":                    "No such file|cannot",
		"cat " + r.state + "/nats-token 2>&1":                    "No such file",
		"cat " + r.state + "/identity/ca.key 2>&1":               "No such file",
		"ls " + r.state + "/secrets 2>&1":                        "No such file|cannot",
		"ls " + r.state + "/nats 2>&1":                           "No such file|cannot",
		fmt.Sprintf("kill -9 %d 2>&1", victims[0]):               "not permitted",
		fmt.Sprintf("kill -9 %d 2>&1", r.up.Cmd.Process.Pid):     "not permitted",
		fmt.Sprintf("cat /proc/%d/environ 2>&1", victims[0]):     "No such file",
		fmt.Sprintf("cat /proc/%d/mem 2>&1", victims[0]):         "No such file",
		fmt.Sprintf("head -c1 < /proc/%d/fd/3 2>&1", victims[0]): "",
		fmt.Sprintf("ls /proc/%d/fd 2>&1", r.up.Cmd.Process.Pid): "No such file|cannot",
		"echo x 2>&1 >> " + image + "/stage":                     "",
		"echo x 2>&1 >> echo-http":                               "",
		"ls -A " + sandbox.RunFolder + " 2>&1":                   "Permission denied",
		"cat " + sandbox.RunFolder + "/groups 2>&1":              "No such file",
		"echo x 2>&1 > /sys/fs/cgroup/pids/cgroup.procs":         "",
		"mount -t tmpfs none /tmp 2>&1":                          "denied|permitted|superuser|only root",
	} {
		got := run(attack)
		if denied == "" && got == "" { // the shell itself has refused, on stderr
			continue
		}
		if !slices.ContainsFunc(strings.Split(denied, "|"), func(s string) bool { return strings.Contains(got, s) }) {
			t.Errorf("%s: %q, want %s", attack, got, denied)
		}
	}
	for _, file := range []string{filepath.Join(image, "stage"), proctest.Built(t, "images", "stagecoach", "echo-http", "0.1.0", "echo-http")} {
		if b, err := os.ReadFile(file); err != nil || strings.HasSuffix(string(b), "x\n") {
			t.Fatalf("%s was written to (%v)", file, err)
		}
	}
	// A fork bomb, in sessions of its own. It stops at the limit of its user and ends with the
	// replica. The other functions answer meanwhile.
	bomb := make(chan struct{})
	go func() {
		defer close(bomb)
		_, _ = r.trySend(http.MethodPost, "/function/shell.hostile", "b() { setsid sh -c \"$B\" & b; }\nexport B='while :; do setsid sh -c \"$B\" & done'\nsh -c \"$B\"\n")
	}()
	uid := 0
	proctest.Until(t, "the bomb to have gone off", func() bool {
		counts := processesOf()
		for u, n := range counts {
			if n > 100 {
				uid = u
			}
		}
		return uid != 0
	})
	for range 3 {
		r.must(http.StatusOK, http.MethodPost, "/function/victim", "x")
	}
	if n := processesOf()[uid]; n > sandbox.MaxProcesses {
		t.Errorf("user %d has %d processes, want %d at most", uid, n, sandbox.MaxProcesses)
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"shell","namespace":"hostile"}`)
	proctest.Until(t, "nothing of the bomb to be left", func() bool { return processesOf()[uid] == 0 })
	<-bomb
	if now := r.pids("noop", false); !slices.Equal(now, victims) {
		t.Errorf("the victim's replicas are %v, were %v", now, victims)
	}
}

// processesOf counts processes by their user, of those that functions run as.
func processesOf() map[int]int {
	entries, _ := os.ReadDir("/proc")
	out := map[int]int{}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		if info, err := os.Stat("/proc/" + e.Name()); err == nil {
			if uid := int(info.Sys().(*syscall.Stat_t).Uid); within(uid) {
				out[uid]++
			}
		}
	}
	return out
}

// TestSecretsOfOneFunction has functions of one namespace, some with the same image. Each sees only
// its own secrets, with their present values. It does not see the processes of other users.
func TestSecretsOfOneFunction(t *testing.T) {
	needRoot(t)
	t.Parallel()
	r := start(t)
	for _, name := range []string{"key", "cert"} {
		r.must(http.StatusCreated, http.MethodPost, "/system/secrets", fmt.Sprintf(`{"name":%q,"value":"%[1]s-1"}`, name))
	}
	deploy := func(method, name, more string) {
		t.Helper()
		r.must(http.StatusAccepted, method, "/system/functions", fmt.Sprintf(
			`{"service":%q,"image":"stagecoach/wait:0.1.0","envVars":{"STAGECOACH_MODEL":"model/rec.onnx"},"labels":{"com.openfaas.scale.max":"1"}%s}`, name, more))
		r.must(http.StatusOK, http.MethodPost, "/function/"+name, "x")
	}
	shell := func(name, more string) func(script string) string {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(
			`{"service":%q,"image":"stagecoach/echo-http:0.1.0","envProcess":"/bin/sh","envVars":{"mode":"streaming","secret_mount_path":"/root"},"labels":{"com.openfaas.scale.max":"1"}%s}`, name, more))
		return func(script string) string {
			t.Helper()
			return string(r.must(http.StatusOK, http.MethodPost, "/function/"+name, script+"\nexit 0\n").Body)
		}
	}
	deploy(http.MethodPost, "plain", "")
	plain := r.pids("wait", false)
	deploy(http.MethodPost, "keyed", `,"secrets":["key"]`)
	replicas, zygotes := r.pids("wait", false), r.pids("wait", true)
	if len(plain) != 1 || len(replicas) != 2 || len(zygotes) != 2 {
		t.Fatalf("replicas %v, of which %v without secrets, zygotes %v, want 2, 1 and 2", replicas, plain, zygotes)
	}
	keyed := slices.DeleteFunc(replicas, func(pid int) bool { return pid == plain[0] })[0]
	mine, others := shell("reader", `,"secrets":["key","cert"]`), shell("hostile", "")
	if got := mine(`cd "$secret_mount_path" && ls && cat *`); got != "cert\nkey\ncert-1key-1" {
		t.Errorf("a program finds %q", got)
	}
	look := func(pid int) string {
		t.Helper()
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/root%s/*/*/*/*/*", pid, sandbox.RunFolder))
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Error(err)
			}
			parts := strings.Split(file, "/")
			out = append(out, strings.Join([]string{parts[len(parts)-3], parts[len(parts)-1], string(b)}, " "))
		}
		return strings.Join(out, ", ")
	}
	if got := look(keyed) + ";" + look(plain[0]); got != "keyed key key-1;" {
		t.Errorf("the replicas find %q", got)
	}
	folders, err := filepath.Glob(fmt.Sprintf("/proc/%d/root%s/*/openfaas-fn/keyed/*", keyed, sandbox.RunFolder))
	if err != nil || len(folders) != 1 {
		t.Fatalf("folders %q, %v", folders, err)
	}
	folder := strings.TrimPrefix(folders[0], fmt.Sprintf("/proc/%d/root", keyed))
	for _, run := range []func(string) string{others, mine} {
		for attack, denied := range map[string]string{
			"cat " + folder + "/key 2>&1": "No such file", "ls " + folder + " 2>&1": "No such file|cannot|Permission denied",
			"ls " + sandbox.RunFolder + " 2>&1":                                            "Permission denied",
			"ls " + filepath.Dir(filepath.Dir(filepath.Dir(folder))) + " 2>&1":             "No such file|cannot|Permission denied",
			fmt.Sprintf("cat /proc/%d/root%s/key 2>&1", keyed, folder):                     "No such file",
			fmt.Sprintf("ls /proc/%d/cwd/ 2>&1", keyed):                                    "No such file|cannot",
			fmt.Sprintf("cat /proc/%d/cmdline /proc/%d/cmdline 2>&1", keyed, os.Getpid()):  "No such file",
			fmt.Sprintf("cat /proc/%d/cmdline /proc/1/cmdline 2>&1", r.up.Cmd.Process.Pid): "No such file",
			"cat /proc/[0-9]*/cmdline | grep -ac '[s]tagecoach'; true":                     "0",
		} {
			got := run(attack)
			if !slices.ContainsFunc(strings.Split(denied, "|"), func(s string) bool { return strings.Contains(got, s) }) || strings.Contains(got, "key-1") {
				t.Errorf("%s: %q, want %s", attack, got, denied)
			}
		}
	}
	if got := others(`echo "[$secret_mount_path]"; find ` + sandbox.RunFolder + ` 2>/dev/null`); got != "[]\n"+sandbox.RunFolder+"\n" {
		t.Errorf("a program without secrets finds %q", got)
	}
	r.must(http.StatusAccepted, http.MethodPut, "/system/secrets", `{"name":"key","value":"key-2"}`)
	if got := look(keyed) + ";" + look(plain[0]); got != "keyed key key-2;" {
		t.Errorf("after the change, the replicas find %q", got)
	}
	if got := mine(`cat "$secret_mount_path/key"`); got != "key-2" {
		t.Errorf("after the change, a program finds %q", got)
	}
	// After a deploy with other secrets, replicas of the earlier deploy keep their secrets for as
	// long as they run.
	r.must(http.StatusAccepted, http.MethodPut, "/system/functions", `{"service":"keyed","image":"stagecoach/wait:0.1.0","secrets":["cert"],
		"envVars":{"STAGECOACH_MODEL":"model/rec.onnx"},"labels":{"com.openfaas.scale.max":"1"}}`)
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s/key", keyed, folder)); err == nil && string(b) != "key-2" || err != nil && !gonePID(keyed) {
		t.Errorf("an earlier replica finds %q, %v", b, err)
	}
	r.until(late, "a replica of the later deploy", func() bool {
		return slices.ContainsFunc(r.pids("wait", false), func(pid int) bool { return look(pid) == "keyed cert cert-1" })
	})
	if got := r.pids("wait", false); !slices.Contains(got, plain[0]) {
		t.Errorf("replicas %v: the one without secrets, %d, has ended", got, plain[0])
	}
}

// gonePID reports whether a process has ended.
func gonePID(pid int) bool {
	_, err := readProcess(pid)
	return err != nil
}

// TestSecretsUsed checks that a function's other folders of secrets count as used only while the
// function has replicas of another deploy.
func TestSecretsUsed(t *testing.T) {
	now, before := cluster.Replica{Replica: plan.Replica{Revision: 7}}, cluster.Replica{Replica: plan.Replica{Revision: 5, State: plan.Draining}}
	for _, tc := range []struct {
		replicas []cluster.Replica
		revision uint64
		want     bool
	}{{nil, 7, false}, {[]cluster.Replica{now}, 7, false}, {[]cluster.Replica{now, before}, 7, true}, {nil, 0, false}, {[]cluster.Replica{now}, 0, true}} {
		if got := hasEarlier(tc.replicas, tc.revision); got != tc.want {
			t.Errorf("%+v beside revision %d: %t, want %t", tc.replicas, tc.revision, got, tc.want)
		}
	}
}
