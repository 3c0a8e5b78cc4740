package proctest

import (
	"archive/zip"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Wheel writes a Python package that pip installs without a network. files has the content of each
// file by its name. Wheel returns the package's file name.
func Wheel(t testing.TB, dir, name, version string, files map[string]string) string {
	t.Helper()
	info := name + "-" + version + ".dist-info/"
	all := maps.Clone(files)
	all[info+"METADATA"] = fmt.Sprintf("Metadata-Version: 2.1\nName: %s\nVersion: %s\n", name, version)
	all[info+"WHEEL"] = "Wheel-Version: 1.0\nGenerator: proctest\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
	all[info+"entry_points.txt"] = fmt.Sprintf("[console_scripts]\n%s = %[1]s:main\n", name)
	var record strings.Builder
	for _, file := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&record, "%s,,\n", file)
	}
	all[info+"RECORD"] = record.String() + info + "RECORD,,\n"
	wheel := filepath.Join(dir, name+"-"+version+"-py3-none-any.whl")
	f, err := os.Create(wheel)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z := zip.NewWriter(f)
	for _, file := range slices.Sorted(maps.Keys(all)) {
		w, err := z.Create(file)
		if err == nil {
			_, err = w.Write([]byte(all[file]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return wheel
}
