package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/keysmanager/network/cni"
)

// Doctor is the command that says what this machine lacks for a node, or for --runtime containerd
// and for --cni-conf if that is given. It fails if something is missing.
type Doctor struct {
	Version string // of this program
	Probe   Probe
}

// Run runs the command.
func (of Doctor) Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("doctor", flag.ContinueOnError)
	c := contained.Config{}
	d := nodeDoctor{probe: of.Probe}
	d.add(fs)
	runtime := fs.String("runtime", "", "the runtime to look at: containerd, or process with --node; default containerd without --node")
	fs.StringVar(&c.Address, "containerd-address", container.Address, "path of containerd's socket")
	fs.StringVar(&c.Namespace, "containerd-namespace", container.Namespace, "namespace of containerd for the containers")
	fs.StringVar(&c.Snapshotter, "containerd-snapshotter", contained.DefaultSnapshotter, "snapshotter of containerd that unpacks images")
	cniConf := fs.String("cni-conf", "", "configuration of CNI plugins to look at, as up has it")
	cniDirs := fs.String("cni-bin-dir", cni.DefaultBinDir, "folder of the CNI plugins, or several with colons between")
	asJSON := console.JSONFlag(fs)
	fs.Func("o", "json: print JSON instead of a table", func(s string) error {
		if *asJSON = s == "json"; !*asJSON && s != "table" {
			return fmt.Errorf("%q, want json or table", s)
		}
		return nil
	})
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	var machines []diagnosis
	switch {
	case d.node && (*runtime == "" || *runtime == "process"):
		return reportAll(d.look(ctx, machine{user: os.Geteuid()}, of.Version), *asJSON, out)
	case d.node:
		machines = d.look(ctx, machine{user: os.Geteuid()}, of.Version)
	case d.join != "":
		return errors.New("--join: want --node, too")
	}
	if *runtime != "containerd" && *runtime != "" {
		return fmt.Errorf("--runtime: %q, want containerd; the runtime process needs nothing without --node", *runtime)
	}
	all := append(contained.Check(ctx, c), beside("stagecoach-init"))
	if *cniConf != "" {
		all = append(all, plugins(ctx, *cniConf, *cniDirs)...)
	}
	if d.node {
		return reportAll(append(machines, ofContainerd(ctx, all)...), *asJSON, out)
	}
	missing := 0
	t := console.NewTable(out)
	fmt.Fprintln(t, "CHECK\tSTATE\tFOUND\tTO DO")
	for i := range all {
		f := &all[i]
		state := "missing"
		if f.OK {
			state, f.ToDo = "ok", ""
		} else {
			missing++
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f.Check, state, f.Found, f.ToDo)
	}
	var err error
	if *asJSON {
		err = json.NewEncoder(out).Encode(all)
	} else {
		err = t.Flush()
	}
	if err != nil {
		return err
	}
	if missing > 0 {
		return fmt.Errorf("%d of %d checks failed: do what they say, then try again", missing, len(all))
	}
	return nil
}

// plugins looks at the CNI plugins of a configuration.
func plugins(ctx context.Context, conf, dirs string) (out []contained.Finding) {
	for _, p := range cni.Check(ctx, cni.Config{Conf: conf, BinDirs: cni.BinDirs(dirs)}) {
		f := contained.Finding{Check: "CNI " + p.What, OK: p.OK, Found: p.Found, ToDo: "correct the file, or name another one with --cni-conf"}
		if p.What != cni.Configuration {
			f.ToDo = "install the plugin (Debian: apt-get install containernetworking-plugins, in /usr/lib/cni), or name its folder with --cni-bin-dir"
		}
		out = append(out, f)
	}
	return out
}

// beside looks for a program in the folder of this program.
func beside(program string) contained.Finding {
	f := contained.Finding{Check: program, ToDo: "make build puts it beside stagecoach; copy both"}
	self, err := os.Executable()
	if err != nil {
		f.Found = err.Error()
		return f
	}
	f.Found = filepath.Join(filepath.Dir(self), program)
	info, err := os.Stat(f.Found)
	if f.OK = err == nil && info.Mode().IsRegular(); !f.OK {
		f.Found = "no " + f.Found
	}
	return f
}
