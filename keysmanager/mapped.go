package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// seals are those of memory that replicas map: nobody can change it any more, in content or size.
const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// pack has a process of the function's own program write the pre-packed form of its parameters to memory, and seals that.
// What it returns is no process: its replicas are processes of the warden's that map the memory.
func (m *Manager) pack(ctx context.Context, cmd sandbox.Command, key zygoteKey, s Spec, began func(pid int)) (*zygote, error) {
	z := m.newZygote(key, newEntry("zygote"), s.Function)
	memory, err := newMemory()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := m.runPacker(ctx, z, s, cmd, memory, began); err != nil {
		closeFiles(memory)
		return nil, err
	}
	for _, f := range memory {
		var st unix.Stat_t
		_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
		if err = errors.Join(err, unix.Fstat(int(f.Fd()), &st)); err != nil {
			closeFiles(memory)
			return nil, fmt.Errorf("seal the memory of %s: %w", f.Name(), err)
		}
		z.bytes += st.Blocks * 512
	}
	z.memory, z.entry = memory, newEntry("memory")
	z.loaded, z.load = time.Now(), time.Since(begin)
	if err := m.warden.Put(z.entry, z.meta(), memory...); err != nil {
		m.cfg.Log.Warn("parameters in memory would not be adopted by another daemon", "function", s.Function, "error", err)
	}
	return z, nil
}

// newMemory makes the files for a graph and its weights.
func newMemory() ([]*os.File, error) {
	var files []*os.File
	for _, name := range []string{"graph", "weights"} {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
		if errors.Is(err, unix.EINVAL) { // before Linux 6.3
			fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		}
		if err != nil {
			closeFiles(files)
			return nil, fmt.Errorf("memory for %s: %w", name, err)
		}
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	return files, nil
}

// runPacker runs the process that packs, to its end.
func (m *Manager) runPacker(ctx context.Context, z *zygote, s Spec, cmd sandbox.Command, memory []*os.File, began func(pid int)) error {
	null, err := os.Open(os.DevNull) // where a replica has its stage socket
	if err != nil {
		return err
	}
	defer null.Close()
	output, err := sandbox.NewOutput(m.zygoteOutput(z.key, z.function))
	if err != nil {
		return err
	}
	group, groups, err := m.enclose(z.entry, z.function, m.zygoteLimits())
	if err != nil {
		output.Started()
		output.Abandon()
		return err
	}
	defer m.disclose(group)
	defer closeFiles(groups)
	cmd.Env[wire.EnvPack] = "1"
	cmd.Files, cmd.Groups, cmd.Stdout, cmd.Stderr = slices.Concat([]*os.File{null}, memory), groups, output.Stdout, output.Stderr
	ended := m.await(z.entry)
	pid, err := m.begin(s, itself, warden.Process{Name: z.entry, Meta: z.meta(), Command: cmd, Keep: output.Readers(), Idle: true})
	output.Started()
	if err != nil {
		m.forgo(z.entry)
		output.Abandon()
		return err
	}
	began(pid)
	stop := context.AfterFunc(ctx, z.kill)
	end := <-ended
	stop()
	output.Finish(linesMoment)
	m.drop(z.entry)
	switch e := endingOf(end); {
	case ctx.Err() != nil:
		return fmt.Errorf("its parameters were not packed in time: %w", context.Cause(ctx))
	case !e.well:
		return fmt.Errorf("its parameters cannot be packed: %w", group.explain(e).saying(output))
	}
	return nil
}

// free gives memory back, once its replicas have ended; they keep what they map. kept says that it is left to the warden.
func (z *zygote) free(kept bool) {
	z.once.Do(func() {
		closeFiles(z.memory)
		if !kept {
			z.owner.drop(z.entry)
		}
		close(z.gone)
	})
}

// leave stops to listen to a zygote, or closes memory, that the warden keeps.
func (z *zygote) leave() {
	if z.memory != nil {
		z.free(true)
		return
	}
	_ = z.conn.Close() // read ends
}

// unmap says that a replica that maps the memory of z has ended.
func (z *zygote) unmap(p *process) {
	z.mu.Lock()
	defer z.mu.Unlock()
	delete(z.children, uint32(p.pid))
}
