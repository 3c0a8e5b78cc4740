package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestResolveFindsTheImagesFolder(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "stagecoach/ocr/0.1.0/stage"), "x")
	write(t, filepath.Join(dir, "a/latest/run"), "x") // no stage
	write(t, filepath.Join(dir, "file"), "x")
	images := Images{Dir: filepath.Join(dir, ".")}
	for image, want := range map[string]string{"stagecoach/ocr:0.1.0": "stagecoach/ocr/0.1.0", "a": "a/latest"} {
		got, err := images.Resolve(image)
		if err != nil || got.Root != filepath.Join(dir, want) || got.Name != image || len(got.Digest) != 32 || got.Stage != (image != "a") {
			t.Errorf("%q: %+v, %v, want root %s", image, got, err, want)
		}
	}
	for image, want := range map[string]string{
		"stagecoach/ocr:0.2.0": filepath.Join(dir, "stagecoach/ocr/0.2.0"), // the folder that was tried
		"file:1":               "no folder",
		"":                     "want repository[:tag]",
		"../etc:1":             `".."`,
		"a:..":                 `".."`,
		"a:../../etc":          "want repository[:tag]",
		"/etc":                 "want repository[:tag]",
		"a//b:1":               "want repository[:tag]",
		"a/.hidden:1":          `".hidden"`,
		"a:1:2":                "want repository[:tag]",
		"a\x00b:1":             "want repository[:tag]",
	} {
		if _, err := images.Resolve(image); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), strconv.Quote(image)) {
			t.Errorf("%q: got %v, want an error with %q and the image's name", image, err, want)
		}
	}
}

func TestDigestFollowsTheFiles(t *testing.T) {
	dir := t.TempDir()
	stage := filepath.Join(dir, "a/1/stage")
	write(t, stage, "one")
	if err := os.Symlink("1", filepath.Join(dir, "a/latest")); err != nil {
		t.Fatal(err)
	}
	images, seen := Images{Dir: dir}, []string{}
	digest := func(what string) {
		t.Helper()
		tag, err := images.Resolve("a:1")
		if err != nil {
			t.Fatal(err)
		}
		link, err := images.Resolve("a")
		if err != nil || link.Digest != tag.Digest {
			t.Errorf("%s: through a link got %+v, %v, want the digest of %+v", what, link, err, tag)
		}
		if slices.Contains(seen, tag.Digest) {
			t.Errorf("%s: the digest has not changed", what)
		}
		seen = append(seen, tag.Digest)
		if again, err := images.Resolve("a:1"); err != nil || again.Digest != tag.Digest {
			t.Errorf("%s: unchanged it is %+v, %v, want %+v", what, again, err, tag)
		}
	}
	digest("at first")
	write(t, stage, "other")
	digest("another size")
	if err := os.Chtimes(stage, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	digest("another modification time")
	write(t, filepath.Join(dir, "a/1/model/m.onnx"), "m")
	digest("a file more")
	if err := os.Rename(filepath.Join(dir, "a/1/model/m.onnx"), filepath.Join(dir, "a/1/model/n.onnx")); err != nil {
		t.Fatal(err)
	}
	digest("another name")
	// Files of packages have the time 1970, so another file of the same size and time may replace one.
	for what, content := range map[string]string{"a package": "x = 1", "another package": "x = 2"} {
		next := filepath.Join(dir, "next.py")
		write(t, next, content)
		if err := errors.Join(os.Chtimes(next, time.Unix(0, 0), time.Unix(0, 0)), os.Rename(next, filepath.Join(dir, "a/1/m.py"))); err != nil {
			t.Fatal(err)
		}
		digest(what)
	}
}

// FuzzImage checks that no image name leads out of the folder.
func FuzzImage(f *testing.F) {
	for _, s := range []string{"stagecoach/ocr-detect:0.1.0", "a", "../a:1", "a:..", "a/./b", "/", ":", "a\\..\\b", "a/..:x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, image string) {
		folder, err := Images{Dir: "/images"}.folder(image)
		if err != nil {
			return
		}
		if rel, err := filepath.Rel("/images", folder); err != nil || rel == "." || !filepath.IsLocal(rel) || strings.HasPrefix(rel, ".") {
			t.Fatalf("%q is %s", image, folder)
		}
	})
}

// lines collects what a process prints.
type lines struct {
	mu  sync.Mutex
	all []string
	one chan string // the first line, if wanted
}

func (l *lines) add(stream, line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, stream+": "+line)
	select {
	case l.one <- line:
	default:
	}
}

func (l *lines) sorted() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(slices.Values(l.all))
}

// start starts c with its output into l.
func start(t *testing.T, s *Spawner, c Command) (Process, *Output, *lines) {
	t.Helper()
	l := &lines{one: make(chan string, 1)}
	o, err := NewOutput(l.add)
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout, c.Stderr = o.Stdout, o.Stderr
	p, err := s.Start(t.Context(), c)
	o.Started()
	if err != nil {
		t.Fatal(err)
	}
	return p, o, l
}

// finished runs c until it ends and returns its lines, sorted.
func finished(t *testing.T, s *Spawner, c Command) []string {
	t.Helper()
	p, o, l := start(t, s, c)
	if status := p.Wait(); status != 0 {
		t.Errorf("%s: status %#x, want 0", c.Process, status)
	}
	o.Finish(10 * time.Second)
	return l.sorted()
}

func newSpawner(t *testing.T) *Spawner {
	t.Helper()
	s := NewSpawner()
	t.Cleanup(s.Close)
	return s
}

func TestProcessInheritsOnlyItsCommand(t *testing.T) {
	t.Setenv("SECRET", "of the manager")
	t.Setenv("GOCOVERDIR", "")
	// As a careless parent leaves it: not close-on-exec.
	inherited, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inherited)
	given, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer given.Close()
	s, dir := newSpawner(t), t.TempDir()
	write(t, filepath.Join(dir, "stage"), "#!/bin/sh\nreadlink /proc/$$/fd/0 /proc/$$/fd/3\n")
	for process, want := range map[string][]string{
		"env": {
			"HOME=" + os.TempDir() + fmt.Sprintf("/stagecoach-home-%d", os.Geteuid()), "LOGNAME=" + starterName(), "NAME=a b",
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp", "USER=" + starterName(),
		},
		"pwd":              {dir},
		"ls /proc/self/fd": {"0", "1", "2", "3", "4"}, // 4 is the folder that ls lists
		"":                 {"/dev/null", "/dev/zero"},
		"./stage":          {"/dev/null", "/dev/zero"},
	} {
		for i := range want {
			want[i] = "stdout: " + want[i]
		}
		got := finished(t, s, Command{Dir: dir, Process: process, Env: map[string]string{"NAME": "a b"}, Files: []*os.File{given}})
		// The shell and exec set these themselves.
		got = slices.DeleteFunc(got, func(l string) bool { return strings.Contains(l, "PWD=") })
		if !slices.Equal(got, want) {
			t.Errorf("process %q prints %q, want %q", process, got, want)
		}
	}
	p, o, _ := start(t, s, Command{Dir: dir, Process: "sleep 600"})
	if sid, err := unix.Getsid(p.PID()); sid != p.PID() {
		t.Errorf("session %d, %v, want its own, %d", sid, err, p.PID())
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if status := p.Wait(); !status.Signaled() || status.Signal() != syscall.SIGTERM {
		t.Errorf("status %#x, want SIGTERM", status)
	}
	o.Finish(time.Second)
}

func TestStartNamesTheMissingProgram(t *testing.T) {
	s, dir := newSpawner(t), t.TempDir()
	write(t, filepath.Join(dir, "text"), "no program")
	for process, want := range map[string]string{"": "start ./stage in " + dir, "./text": "./text", "no-such-program": "no-such-program"} {
		if _, err := s.Start(t.Context(), Command{Dir: dir, Process: process}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("process %q: %v, want an error with %q", process, err, want)
		}
	}
	s.Close()
	if _, err := s.Start(t.Context(), Command{Dir: dir, Process: "true"}); err == nil {
		t.Error("a closed spawner starts")
	}
}

// TestWaitEndsTheProcessGroup starts a process that leaves a child behind. Wait kills the child.
func TestWaitEndsTheProcessGroup(t *testing.T) {
	s, dir := newSpawner(t), t.TempDir()
	write(t, filepath.Join(dir, "stage"), "#!/bin/sh\nsleep 600 & echo $!\nexit 7\n")
	p, o, l := start(t, s, Command{Dir: dir})
	if status := p.Wait(); status.ExitStatus() != 7 {
		t.Errorf("status %#x, want 7", status)
	}
	o.Finish(10 * time.Second)
	child, err := strconv.Atoi(<-l.one)
	if err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, child)
}

func TestProcessesEndWithTheSpawner(t *testing.T) {
	s := NewSpawner()
	p, o, _ := start(t, s, Command{Dir: t.TempDir(), Process: "sleep 600"})
	s.Close()
	if status := p.Wait(); status.Signal() != syscall.SIGKILL {
		t.Errorf("status %#x, want SIGKILL", status)
	}
	o.Finish(time.Second)
}

func TestLinesAreBounded(t *testing.T) {
	var got []string
	long := strings.Repeat("x", MaxLine)
	readLines(strings.NewReader("a\r\n\n"+long+"y\nb\n"+long+"\n"+long+long+long+"\nend"), func(l string) { got = append(got, l) })
	if want := []string{"a", "", long, "b", long, long, "end"}; !slices.Equal(got, want) {
		t.Errorf("%d lines %.40q, want %d", len(got), got, len(want))
	}
}

func TestOutputDeliversEachLine(t *testing.T) {
	l := &lines{}
	o, err := NewOutput(l.add)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(o.Stdout, "one\ntwo")
	fmt.Fprint(o.Stderr, "bad\nworse\n\n  \n")
	o.Started()
	o.Finish(10 * time.Second)
	if got, want := l.sorted(), []string{"stderr: ", "stderr:   ", "stderr: bad", "stderr: worse", "stdout: one", "stdout: two"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if o.LastError() != "worse" {
		t.Errorf("last error %q, want worse", o.LastError())
	}
}

// TestLastErrorOfACrash checks that the last error is the reason of a Go program's crash, and not a
// line of its stacks.
func TestLastErrorOfACrash(t *testing.T) {
	for _, test := range []struct{ name, printed, want string }{
		{"panic", "starting\npanic: no model\n\ngoroutine 1 [running]:\nmain.main()\n\t/main.go:3 +0x1d\n", "panic: no model"},
		{"fatal error", "runtime: failed to create new OS thread\nfatal error: newosproc\n\nruntime stack:\nruntime.throw()\n", "fatal error: newosproc"},
		{"a line like a panic", "panic: of a test\nno model\n", "no model"},
		{"stacks without a reason", "goroutine 1 [running]:\nno model\n", "no model"},
	} {
		t.Run(test.name, func(t *testing.T) {
			o, err := NewOutput(func(string, string) {})
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprint(o.Stderr, test.printed)
			o.Started()
			o.Finish(10 * time.Second)
			if got := o.LastError(); got != test.want {
				t.Errorf("last error %q, want %q", got, test.want)
			}
		})
	}
}

// TestFinishDoesNotWaitForever keeps a writing end open, as a process that was left behind would.
func TestFinishDoesNotWaitForever(t *testing.T) {
	for name, end := range map[string]func(*Output){
		"finish":  func(o *Output) { o.Finish(10 * time.Millisecond) },
		"abandon": (*Output).Abandon,
	} {
		t.Run(name, func(t *testing.T) {
			o, err := NewOutput(func(string, string) {})
			if err != nil {
				t.Fatal(err)
			}
			defer o.Started()
			end(o) // returns, or the test times out
			if _, err := o.Stdout.WriteString("x"); err == nil {
				t.Error("somebody still listens")
			}
		})
	}
}
