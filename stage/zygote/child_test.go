package zygote_test

import (
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestMain is where a forked child of the test binary starts its Go code. In every process, the C
// constructor has run before it.
func TestMain(m *testing.M) {
	fd, env, ok := zygote.Child()
	session := zygote.Inherited()
	if o := os.Getenv(openEnv); !ok && o != "" {
		var err error
		if session, err = openHere(o); err != nil {
			fmt.Fprintln(os.Stderr, "open:", err)
			os.Exit(3)
		}
		fd, ok = 3, true
	}
	if ok {
		if err := child(fd, env, session); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// openEnv makes this test binary an ordinary process that answers questions on descriptor 3. Its
// value is a zygote.Options as JSON.
const openEnv = "ZYGOTE_TEST_OPEN"

func openHere(options string) (*zygote.Session, error) {
	var o zygote.Options
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		return nil, err
	}
	return zygote.Open(o)
}

// question is sent to a child over its stage socket. The child sends an answer.
type question struct {
	Do     string // look, run, run in parallel, add threads, close, print, exit
	Inputs []tensor.Tensor
	Total  int // for "add threads"
}

type answer struct {
	PID     int
	Env     []string          // from the order
	Environ []string          // as the Go runtime sees it
	Args    []string          // of the process
	FDs     map[string]string // target by descriptor
	Seeds   string
	Status  string // /proc/self/status of a process that it starts
	Pool    int    // threads of the pool
	Session bool
	Inputs  []zygote.Info
	Tensors []tensor.Tensor
	Busy    int // threads of the pool that have used processor time
	Threads int // the result of "add threads"
	Error   string
}

// child answers questions until its socket closes.
func child(fd int, env []string, session *zygote.Session) error {
	// Draw these before other code uses random numbers.
	seeds := fmt.Sprint(maphash.String(maphash.MakeSeed(), "x"), rand.Uint64())
	socket := os.NewFile(uintptr(fd), "stage socket")
	in, out := gob.NewDecoder(socket), gob.NewEncoder(socket)
	for {
		var q question
		if err := in.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		a := answer{PID: os.Getpid(), Env: env, Environ: os.Environ(), Args: os.Args, Seeds: seeds, Session: session != nil}
		if session != nil {
			a.Inputs = session.Inputs()
		}
		var err error
		switch q.Do {
		case "look":
			a.FDs = descriptors()
			var status []byte
			status, err = exec.Command("cat", "/proc/self/status").Output()
			a.Status = string(status)
		case "run":
			before := poolTimes()
			a.Tensors, err = session.Run(q.Inputs)
			after := poolTimes()
			a.Pool = len(after)
			for thread, t := range after {
				if t > before[thread] {
					a.Busy++
				}
			}
		case "run in parallel":
			err = inParallel(session, q)
		case "add threads":
			a.Threads, err = session.AddThreads(q.Total)
		case "close":
			session.Close()
			_, err = session.Run(q.Inputs)
		case "print":
			fmt.Fprint(os.Stdout, "to stdout of ", os.Getenv("NAME"))
			fmt.Fprint(os.Stderr, "to stderr")
		case "exit":
			os.Exit(7)
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

// inParallel runs the same inputs on several goroutines and compares the outputs.
func inParallel(s *zygote.Session, q question) error {
	want, err := s.Run(q.Inputs)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() {
			for range 8 {
				got, err := s.Run(q.Inputs)
				if err == nil && string(got[0].Data) != string(want[0].Data) {
					err = fmt.Errorf("goroutine %d: another output", i)
				}
				if err != nil {
					errs[i] = err
					return
				}
				debug.FreeOSMemory() // runs the garbage collector meanwhile
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// descriptors returns the open descriptors of this process, without those of the Go runtime and of
// the listing itself.
func descriptors() map[string]string {
	const dir = "/proc/self/fd"
	d, err := os.Open(dir)
	if err != nil {
		return map[string]string{"error": err.Error()}
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	all := map[string]string{}
	for _, name := range names {
		to, err := os.Readlink(dir + "/" + name)
		own := name == strconv.Itoa(int(d.Fd())) || strings.HasPrefix(to, "anon_inode:[event") || strings.HasPrefix(to, "/sys/fs/cgroup/")
		if err == nil && !own {
			all[name] = to
		}
	}
	return all
}

// poolTimes returns the CPU time of each of the pool's threads, in nanoseconds.
func poolTimes() map[string]int64 {
	times := map[string]int64{}
	tasks, _ := filepath.Glob("/proc/self/task/*")
	for _, task := range tasks {
		name, err := os.ReadFile(task + "/comm")
		if err != nil || string(name) != "ort-pool\n" {
			continue
		}
		b, err := os.ReadFile(task + "/schedstat")
		if f := strings.Fields(string(b)); err == nil && len(f) == 3 {
			times[task], _ = strconv.ParseInt(f[0], 10, 64)
		}
	}
	return times
}
