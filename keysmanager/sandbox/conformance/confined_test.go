package conformance

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// forbidden are things that no program may do.
func forbidden(other int) []string {
	return []string{
		"mount=/tmp", "unshare", "userns", "keys", "mknod=/tmp/device", "write=/proc/sys/kernel/hostname", "write=/proc/sysrq-trigger", "read=/proc/kcore",
		fmt.Sprintf("kill=%d", other), fmt.Sprintf("ptrace=%d", other), "dial=/run/containerd/containerd.sock",
	}
}

// TestForbiddenThingsFail checks from inside that no program can do what could harm others.
func TestForbiddenThingsFail(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		for name, c := range map[string]sandbox.Command{"account": r.beside(image(t)), "root": inside(image(t)), "user": inside(image(t))} {
			if name == "user" {
				c.User = "app"
			}
			things := forbidden(os.Getpid())
			c.Argv = append(c.Argv, append(things, "status=NoNewPrivs", "status=CapEff", "status=CapPrm", "status=CapInh", "status=CapAmb", "id")...)
			text := r.said(t, c)
			for _, thing := range things {
				// A process with an account has keys of its user. It may have a user namespace where
				// the machine lets users have one.
				if name == "account" && r.name == "process" && slices.Contains([]string{"userns", "unshare", "keys"}, thing) {
					continue
				}
				if !strings.Contains(text, "stdout: "+thing+": ") {
					t.Errorf("%s: %s is allowed:\n%s", name, thing, text)
				}
			}
			want(t, text, "NoNewPrivs: 1", "CapInh: 0000000000000000", "CapAmb: 0000000000000000")
			if name != "root" {
				want(t, text, "CapEff: 0000000000000000", "CapPrm: 0000000000000000")
			} else {
				want(t, text, "CapEff: 00000000a00405fb")
			}
		}
	})
}

// TestProgramSeesItsOwnProcessesAlone checks that /proc of a program with its own root has no other
// processes.
func TestProgramSeesItsOwnProcessesAlone(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		text := r.said(t, inside(image(t), "pid"))
		if strings.Count(text, "/proc/") > 2 { // its own, and the first of its container
			t.Errorf("it sees %s", text)
		}
		p := r.start(t, r.beside(image(t), "wait"))
		p.awaitLine(t)
		text = r.said(t, r.beside(image(t), fmt.Sprintf("read=/proc/%d/environ", os.Getpid()), fmt.Sprintf("read=/proc/%d/maps", os.Getpid())))
		want(t, text, "environ: ", "maps: ", "not PATH=")
		_ = p.Signal(unix.SIGKILL)
		p.end()
	})
}

// TestLimitsHold checks the limits of a process.
func TestLimitsHold(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		text := r.said(t, r.beside(image(t), "limits"))
		want(t, text, "limit: core 0 0", "limit: nproc 1024 1024", fmt.Sprintf("limit: fsize %d %d", sandbox.MaxFileSize, sandbox.MaxFileSize), fmt.Sprintf("limit: files %d", sandbox.MaxFiles))
		c := r.beside(image(t), "limits")
		c.Processes = 2000
		want(t, r.said(t, c), "limit: nproc 2000 2000")
		want(t, r.said(t, inside(image(t), "limits")), "limit: core 0 0")
	})
}

// TestProgramIsInItsGroupsFromTheBeginning checks that a program's first look finds it in the
// cgroups of its command.
func TestProgramIsInItsGroupsFromTheBeginning(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		groups, err := cgroup.Open("conformance-" + r.name)
		if err != nil {
			t.Skip(err)
		}
		defer groups.Close()
		for name, c := range map[string]sandbox.Command{"account": r.beside(image(t), "read=/proc/self/cgroup", "child"), "root": inside(image(t), "read=/proc/self/cgroup", "child")} {
			g, err := groups.Create(name, cgroup.Limits{PIDs: 100, Memory: 256 << 20})
			if err != nil {
				t.Fatal(err)
			}
			if c.Groups, err = g.Files(); err != nil {
				t.Fatal(err)
			}
			text := r.said(t, c)
			for _, f := range c.Groups {
				_ = f.Close()
			}
			if n := strings.Count(text, "/stagecoach/conformance-"+r.name+"/"+name); n < len(groupsOf(text)) {
				t.Errorf("%s: it is in its group in %d hierarchies, want %d:\n%s", name, n, len(groupsOf(text)), text)
			}
			if err := g.Remove(); err != nil {
				t.Error(err)
			}
		}
	})
}

// groupsOf returns the hierarchies of a /proc/PID/cgroup in which a group bounds its processes.
func groupsOf(text string) (all []string) {
	for line := range strings.Lines(text) {
		for _, controller := range []string{":cpu:", ":cpu,", ":cpuacct:", ":memory:", ":pids:"} {
			if strings.Contains(line, controller) {
				all = append(all, line)
				break
			}
		}
	}
	return all
}

// TestMemoryLimitKills checks that a program that passes its group's limit on memory is killed, and
// that the group has counted that.
func TestMemoryLimitKills(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		groups, err := cgroup.Open("conformance-" + r.name)
		if err != nil {
			t.Skip(err)
		}
		defer groups.Close()
		g, err := groups.Create("small", cgroup.Limits{Memory: 48 << 20})
		if err != nil {
			t.Fatal(err)
		}
		c := r.beside(image(t))
		c.Argv = []string{"python3", "-c", "b = bytearray(1 << 30); print(len(b))"}
		c.Argv[0] = "/usr/bin/python3"
		if c.Groups, err = g.Files(); err != nil {
			t.Fatal(err)
		}
		p := r.start(t, c)
		status := p.Wait()
		for _, f := range c.Groups {
			_ = f.Close()
		}
		if u, err := g.Usage(); status.Signal() != unix.SIGKILL || err != nil || u.OOMKills == 0 {
			t.Errorf("%#x, %+v, %v, want SIGKILL and a count", status, u, err)
		}
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
		p.output.Finish(0)
		p.Forget()
	})
}

// TestProgramInheritsTheGroupsOfItsRuntime checks that a program without cgroups of its own is in
// those of this process. So the programs of a watchdog have the limits of its replica.
func TestProgramInheritsTheGroupsOfItsRuntime(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		own, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			t.Fatal(err)
		}
		text := r.said(t, r.beside(image(t), "read=/proc/self/cgroup"))
		for _, line := range groupsOf(string(own)) {
			want(t, text, strings.TrimSpace(line)+"\n")
		}
		if strings.Contains(string(own), ":memory:") && len(groupsOf(text)) != len(groupsOf(string(own))) {
			t.Errorf("it is in the groups\n%s\nwant those of this process:\n%s", text, own)
		}
	})
}
