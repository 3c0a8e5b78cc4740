package starts

import (
	"cmp"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// Interpreters returns the paths of the machine's Python interpreters, in the order in which to try
// them. It looks in the active virtual environment, conda's environments, PATH, the working
// directory, the home folder, /opt and /usr/local, and finally in /usr/bin. No path is in the
// result twice.
func Interpreters() (all []string) {
	var patterns []string
	for _, root := range []string{os.Getenv("VIRTUAL_ENV"), os.Getenv("CONDA_PREFIX")} {
		if root != "" {
			patterns = append(patterns, filepath.Join(root, "bin", "python3"))
		}
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		patterns = append(patterns, filepath.Join(cmp.Or(dir, "."), "python3"))
	}
	home, _ := os.UserHomeDir() // empty: it has no environments
	for _, root := range []string{".", home, "/opt/*", "/opt/*/*", "/opt/conda/envs/*", "/usr/local"} {
		if root == "" {
			continue
		}
		for _, env := range []string{"", ".venv", "venv"} {
			patterns = append(patterns, filepath.Join(root, env, "bin", "python3"))
		}
	}
	for _, name := range []string{"miniconda3", "miniforge3", "anaconda3"} {
		patterns = append(patterns, filepath.Join(home, name, "bin", "python3"), filepath.Join(home, name, "envs", "*", "bin", "python3"))
	}
	for _, p := range append(patterns, "/usr/bin/python3") {
		found, _ := filepath.Glob(p) // fails only for a PATH with brackets
		for _, f := range found {
			if abs, err := filepath.Abs(f); err == nil && !slices.Contains(all, abs) {
				all = append(all, abs)
			}
		}
	}
	return all
}

// Output runs a program and returns its standard output. Its limit is three minutes, because the
// first import of PyTorch on a machine reads gigabytes of libraries from disk.
func Output(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = 5 * time.Second
	return cmd.Output()
}
