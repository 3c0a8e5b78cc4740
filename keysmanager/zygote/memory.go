package zygote

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// seals make memory that replicas map unchangeable, in content and size.
const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// Pack runs a process of the function's own program that writes the pre-packed form of the
// parameters to memory. Then Pack seals the memory. The returned Zygote is not a process: its
// replicas are separate processes, which the warden starts and which map the memory.
func Pack(ctx context.Context, h *Host, cmd sandbox.Command, key Key, t resources.Tenant, began func(pid int)) (*Zygote, error) {
	z := newZygote(h, key, NewEntry("zygote"), t.Function)
	memory, err := newMemory()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := z.runPacker(ctx, t, cmd, memory, began); err != nil {
		resources.CloseFiles(memory)
		return nil, err
	}
	for _, f := range memory {
		var st unix.Stat_t
		_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
		if err = errors.Join(err, unix.Fstat(int(f.Fd()), &st)); err != nil {
			resources.CloseFiles(memory)
			return nil, fmt.Errorf("seal the memory of %s: %w", f.Name(), err)
		}
		z.Bytes += st.Blocks * 512
	}
	z.memory, z.Entry = memory, NewEntry("memory")
	z.Loaded, z.Load = time.Now(), time.Since(begin)
	if err := h.Warden.Put(z.Entry, h.Describe(z.Describe()), memory...); err != nil {
		h.Log.Warn("description of parameters in memory is not stored: another daemon would not adopt them", "function", t.Function, "error", err)
	}
	return z, nil
}

// newMemory creates the files for a graph and its weights.
func newMemory() ([]*os.File, error) {
	var files []*os.File
	for _, name := range []string{"graph", "weights"} {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
		if errors.Is(err, unix.EINVAL) { // before Linux 6.3
			fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		}
		if err != nil {
			resources.CloseFiles(files)
			return nil, fmt.Errorf("memory for %s: %w", name, err)
		}
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	return files, nil
}

// runPacker runs the process that packs, to its end.
func (z *Zygote) runPacker(ctx context.Context, t resources.Tenant, cmd sandbox.Command, memory []*os.File, began func(pid int)) error {
	h := z.host
	null, err := os.Open(os.DevNull) // a replica has its stage socket in this place
	if err != nil {
		return err
	}
	defer null.Close()
	output, err := sandbox.NewOutput(z.prints)
	if err != nil {
		return err
	}
	held := h.Pool.New() // for the process; the memory reserves nothing
	defer held.Release()
	groups, err := held.Enter(z.Entry, z.Function, h.Limits)
	defer resources.CloseFiles(groups)
	var ended <-chan warden.Exit
	if err == nil {
		cmd.Env[wire.EnvPack] = "1"
		cmd.Files, cmd.Groups, cmd.Stdout, cmd.Stderr = slices.Concat([]*os.File{null}, memory), groups, output.Stdout, output.Stderr
		ended = h.Exits.Await(z.Entry)
		var pid int
		pid, err = held.Start(ctx, t, resources.Itself, warden.Process{Name: z.Entry, Meta: h.Describe(z.Describe()), Command: cmd, Keep: output.Readers(), Idle: true})
		if err == nil {
			began(pid)
		} else {
			h.Exits.Cancel(z.Entry)
		}
	}
	output.Started()
	if err != nil {
		output.Abandon()
		return err
	}
	stop := context.AfterFunc(ctx, z.Kill)
	end := <-ended
	stop()
	output.Finish(resources.LinesMoment)
	how := held.Group().Explain(resources.EndingOf(end))
	held.Release()
	h.Pool.Drop(z.Entry)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("its parameters were not packed in time: %w", context.Cause(ctx))
	case !how.Well:
		return fmt.Errorf("its parameters cannot be packed: %w", how.Saying(output))
	}
	return nil
}
