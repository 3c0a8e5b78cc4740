package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
)

// Doctor says what this machine lacks for --runtime containerd. It returns an error if it lacks
// something.
func Doctor(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("doctor", flag.ContinueOnError)
	c := contained.Config{}
	runtime := fs.String("runtime", "containerd", "the runtime to look at: containerd")
	fs.StringVar(&c.Address, "containerd-address", container.Address, "path of containerd's socket")
	fs.StringVar(&c.Namespace, "containerd-namespace", container.Namespace, "namespace of containerd for the containers")
	fs.StringVar(&c.Snapshotter, "containerd-snapshotter", contained.DefaultSnapshotter, "snapshotter of containerd that unpacks images")
	asJSON := console.JSONFlag(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if *runtime != "containerd" {
		return fmt.Errorf("--runtime: %q, want containerd; the runtime process needs nothing", *runtime)
	}
	all := append(contained.Check(ctx, c), beside("stagecoach-init"))
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
