package builder

import (
	"bytes"
	"encoding/binary"
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// greet writes the wheel of a package into the folder of a handler that requires it. The package
// has sets and strings, whose compiled form may depend on the hash seed.
func greet(t *testing.T, handler string) {
	t.Helper()
	proctest.Wheel(t, handler, "greet", "1.0", map[string]string{
		"greet/__init__.py":           "def main(x='a'):\n    return x in {'hello', 'world', 'b', 'c', 'd'}\n",
		"greet/broken.py":             "print 'of Python 2'\n",
		"greet/__pycache__/x.pyc":     "somebody else's",
		"greet-1.0.data/data/share/x": "",
	})
}

// noTensors is the content of a safetensors file without tensors.
const noTensors = "\x02\x00\x00\x00\x00\x00\x00\x00{}"

// TestPython builds an image with packages and a model twice, from different folders. Both images
// are the same, and neither names its folder.
func TestPython(t *testing.T) {
	py := proctest.Pip(t)
	digests := map[string]bool{}
	for round := range 2 {
		dir := t.TempDir()
		tree(t, dir, map[string]string{
			"f/handler.py":   "import lib.words\n\ntry:\n    from fast import infer\nexcept ImportError:\n    infer = lib.words.infer\n",
			"f/lib/words.py": "def infer(state, calls):\n    return [c in {'x', 'y', 'z', 'w'} for c in calls]\n", "f/lib/words.txt": "w",
			"f/requirements.txt": "# ours\n./greet-1.0-py3-none-any.whl\n", "f/model/a.safetensors": noTensors, "f/test_handler.py": "", "f/lib/words_test.py": "",
			"f/README.md": "r", "f/.hidden": "h", "f/testdata/x": "x",
		})
		greet(t, filepath.Join(dir, "f"))
		if round > 0 { // as after a test run, and with another umask and hash seed
			tree(t, dir, map[string]string{"f/__pycache__/handler.cpython-311.pyc": "old"})
			for name, value := range map[string]string{
				"PIP_USER": "1", "PIP_REQUIRE_VIRTUALENV": "1", "PYTHONHASHSEED": "5", "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1",
				"PYTHONPYCACHEPREFIX": t.TempDir(), "SOURCE_DATE_EPOCH": "1000000000", "LC_ALL": "C", "TZ": "Asia/Tokyo",
			} {
				t.Setenv(name, value)
			}
		}
		before := list(t, dir)
		b := open(t, dir, map[string]stack.Function{"f": {Lang: "python3-stage", Handler: "f", FProcess: py + " ./stage"}})
		var shown bytes.Buffer
		b.Output = &shown
		r, err := b.Build(t.Context(), "f")
		if err != nil {
			t.Fatal(err)
		}
		files := list(t, r.Dir)
		files = slices.DeleteFunc(files, func(f string) bool { return strings.HasPrefix(f, "stagecoach/") })
		for i, f := range files {
			files[i] = regexp.MustCompile(`\.cpython-3\d+\.pyc$`).ReplaceAllString(f, ".pyc")
		}
		if want := []string{
			"__pycache__/handler.pyc", "handler.py", "lib/__pycache__/words.pyc", "lib/words.py", "lib/words.txt", "model/a.safetensors",
			"requirements.txt", "site-packages/greet/__init__.py", "site-packages/greet/__pycache__/__init__.pyc", "site-packages/greet/broken.py",
			"site-packages/greet-1.0.dist-info/INSTALLER", "site-packages/greet-1.0.dist-info/METADATA",
			"site-packages/greet-1.0.dist-info/RECORD", "site-packages/greet-1.0.dist-info/REQUESTED",
			"site-packages/greet-1.0.dist-info/WHEEL", "site-packages/greet-1.0.dist-info/entry_points.txt",
			"site-packages/share/x", "stage",
		}; !slices.Equal(files, want) {
			t.Errorf("files\n%v, want\n%v", files, want)
		}
		if after := list(t, dir); !slices.Equal(before, after) {
			t.Errorf("the build has left files in the handler: %v, before %v", after, before)
		}
		if !strings.Contains(shown.String(), "Processing ./greet-1.0-py3-none-any.whl") {
			t.Errorf("shown %q, want what pip says", &shown)
		}
		if c := config(python3Stage, r.Dir); !slices.Equal(c.Env, []string{"STAGECOACH_RUNTIME=python", "STAGECOACH_MODEL=model"}) {
			t.Errorf("environment %v", c.Env)
		}
		digest, err := r.Image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests[digest] = true
		checkCompiled(t, r.Dir, dir, b.work)
		runs(t, py, r.Dir)
	}
	if len(digests) != 1 {
		t.Errorf("digests %v, want one", digests)
	}
}

// checkCompiled checks the compiled files. Python loads those of packages without a check, and
// compares those of the handler with their sources. No file names a folder of this machine.
func checkCompiled(t *testing.T, dir string, folders ...string) {
	t.Helper()
	for _, name := range list(t, dir) {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range folders {
			if bytes.Contains(b, []byte(f)) {
				t.Errorf("%s names %s", name, f)
			}
		}
		if filepath.Ext(name) != ".pyc" {
			continue
		}
		want := uint32(1) // PEP 552: hash-based
		if !strings.HasPrefix(name, sdkFolder+"/") && !strings.HasPrefix(name, siteFolder+"/") {
			want = 3 // and compared with the source
		}
		if flags := binary.LittleEndian.Uint32(b[4:]); flags != want {
			t.Errorf("%s: flags %d, want %d", name, flags, want)
		}
	}
}

// runs imports the handler as the image's program does, from compiled files. An exception names the
// image's sources.
func runs(t *testing.T, py, dir string) {
	t.Helper()
	const program = `import os, sys
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "site-packages")]
import handler, greet
print(handler.infer(None, ["x", "v"]), greet.main("world"), handler.infer.__code__.co_filename, greet.main.__code__.co_filename)
`
	cmd := exec.CommandContext(t.Context(), py, "-B", "-c", program)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	want := fmt.Sprintf("[True, False] True %s/lib/words.py %[1]s/site-packages/greet/__init__.py\n", dir)
	if err != nil || string(out) != want {
		t.Errorf("%v, %q, want %q", err, out, want)
	}
}

// TestPythonTemplate builds the files that `faas-cli new` creates. The build needs no pip, and the
// image has all of the SDK and nothing else.
func TestPythonTemplate(t *testing.T) {
	py := proctest.Python(t)
	dir := t.TempDir()
	handler(t, filepath.Join(dir, "f"), python3Stage)
	r, err := open(t, dir, map[string]stack.Function{"f": {Lang: "python3-stage", Handler: "f", FProcess: py + " ./stage"}}).Build(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, name := range list(t, r.Dir) {
		if filepath.Ext(name) != ".pyc" {
			got = append(got, name)
		} else if source := regexp.MustCompile(`__pycache__/(\w+)\.cpython.*`).ReplaceAllString(name, "$1.py"); !slices.Contains(list(t, r.Dir), source) {
			t.Errorf("%s has no source", name)
		}
	}
	want := []string{"handler.py", "requirements.txt", "stage"}
	sdk, err := fs.Glob(stagecoach.Templates(), "python3-stage/stagecoach/*.py")
	if err != nil || len(sdk) < 3 {
		t.Fatalf("SDK %v, %v", sdk, err)
	}
	for _, name := range sdk {
		want = append(want, strings.TrimPrefix(name, "python3-stage/"))
	}
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	if info, err := os.Stat(filepath.Join(r.Dir, "stage")); err != nil || info.Mode().Perm()&0o111 != 0o111 {
		t.Errorf("stage: %v, %v, want an executable", info, err)
	}
	if c := config(python3Stage, r.Dir); !slices.Equal(c.Env, []string{"STAGECOACH_RUNTIME=python"}) {
		t.Errorf("environment %v", c.Env)
	}
}

func TestPythonModel(t *testing.T) {
	for want, files := range map[string][]string{
		"":                  {"model/weights.bin", "model.onnx"},
		"model.safetensors": {"model.safetensors", "model/x.safetensors"},
		"model":             {"model/model-00001-of-00002.safetensors", "model/model.safetensors.index.json", "model/model.onnx"},
		"model/model.onnx":  {"model/model.onnx"},
	} {
		dir := t.TempDir()
		for _, f := range files {
			tree(t, dir, map[string]string{f: ""})
		}
		if got := pythonModel(dir); got != want {
			t.Errorf("%v: %q, want %q", files, got, want)
		}
	}
}

// TestPythonImports checks that the build finds a module that the stage's interpreter lacks, even
// if an installed package or another file of the handler imports it. Files that the import writes
// are not in the image, and other errors of the import do not fail the build.
func TestPythonImports(t *testing.T) {
	py := proctest.Pip(t)
	dir := t.TempDir()
	const infer = "\ndef infer(state, calls):\n    return calls\n"
	tree(t, dir, map[string]string{
		"lacks/handler.py": "import os\nimport no_such.module" + infer,
		"deep/handler.py":  "import lib.words" + infer, "deep/lib/words.py": "\n\nfrom no_such import x\n",
		"package/handler.py": "import broken" + infer, "package/requirements.txt": "./broken-1.0-py3-none-any.whl\n",
		"optional/handler.py": "try:\n    import no_such\nexcept ImportError:\n    no_such = None" + infer,
		"later/handler.py":    infer + "    import no_such\n",
		"other/handler.py":    "open('/var/openfaas/secrets/no-such-key')" + infer,
		"exits/handler.py":    "import os\nos._exit(3)" + infer,
		"name/handler.py":     "from os import no_such_name" + infer,
		"own/handler.py":      "import os, stagecoach, here\nassert os.environ['GREETING'] == 'hello' and 'LEAKED' not in os.environ\nopen('left', 'w').close()" + infer,
		"own/here.py":         "import threading\nthreading.Thread(target=threading.Event().wait).start()\n",
	})
	proctest.Wheel(t, filepath.Join(dir, "package"), "broken", "1.0", map[string]string{"broken/__init__.py": "import no_such\n"})
	t.Setenv("LEAKED", "1")
	t.Setenv("PYTHONPATH", filepath.Join(dir, "elsewhere")) // variables of the user who runs the build
	tree(t, dir, map[string]string{"elsewhere/no_such/__init__.py": ""})
	for name, tc := range map[string]struct{ want, shown string }{
		"lacks":    {want: `handler: handler.py:2: it needs the module 'no_such', which ` + py + " (Python 3."},
		"deep":     {want: "handler: lib/words.py:3: it needs the module 'no_such'"},
		"package":  {want: "handler: handler.py:1: it needs the module 'no_such'"},
		"name":     {want: "handler: handler.py:1: cannot import name 'no_such_name' from 'os'"},
		"optional": {}, "later": {}, "own": {},
		"other": {shown: "build: the import of the handler raises handler.py:1: FileNotFoundError: "},
		"exits": {shown: "exit status 3"},
	} {
		b := open(t, dir, map[string]stack.Function{"f": {
			Lang: "python3-stage", Handler: name, FProcess: py + " ./stage", Environment: map[string]string{"GREETING": "hello"},
		}})
		var shown bytes.Buffer
		b.Output = &shown
		r, err := b.Build(t.Context(), "f")
		switch {
		case tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		case tc.want != "" && !strings.Contains(err.Error(), "--check-imports=false"):
			t.Errorf("%s: %v, want it to say what to do", name, err)
		case tc.want == "" && slices.Contains(list(t, r.Dir), "left"):
			t.Errorf("%s: the import has left a file in the image", name)
		case !strings.Contains(shown.String(), tc.shown) || tc.shown == "" && strings.Contains(shown.String(), "import of the handler"):
			t.Errorf("%s: shown %q, want %q", name, &shown, tc.shown)
		}
		if b.SkipImports = true; tc.want == "" {
			continue
		}
		if _, err := b.Build(t.Context(), "f"); err != nil {
			t.Errorf("%s, without the check: %v", name, err)
		}
	}
}

func TestPythonRefuses(t *testing.T) {
	py := proctest.Pip(t)
	dir := t.TempDir()
	const infer = "def infer(state, calls):\n    return calls\n"
	bare := filepath.Join(dir, "bare") // an interpreter without pip
	if out, err := exec.CommandContext(t.Context(), py, "-m", "venv", "--without-pip", bare).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	tree(t, dir, map[string]string{
		"good/handler.py": infer, "none/x.py": infer, "syntax/handler.py": infer, "syntax/lib/a.py": "x = 1\ndef f(:\n",
		"nul/handler.py": infer + "\x00", "noinfer/handler.py": "import infer.x as y\n\nclass A:\n    def infer(self): ...\n",
		"hides/handler.py": infer, "hides/queue.py": "", "hides/email/__init__.py": "", "hides/lib/json.py": "", "hides/test.py": "", "hides/email/x.py": "",
		"star/handler.py": "from x import *\n", "star/x.py": infer, "sdk/handler.py": infer, "sdk/stagecoach/__init__.py": "", "program/handler.py": infer, "program/stage": "",
		"absent/handler.py": infer, "absent/requirements.txt": "--no-index\n--find-links .\nno-such-package==1.0\n",
		"requires/handler.py": infer, "requires/requirements.txt": "--no-index\nx==1\n",
		"old": "#!/bin/sh\necho 2 7 /opt/old\n", "fails": "#!/bin/sh\necho no such machine >&2\nexit 3\n",
	})
	for _, program := range []string{"old", "fails"} {
		if err := os.Chmod(filepath.Join(dir, program), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		handler, process string
		want             []string // parts of the error; none: the build works
	}{
		"good":                    {"good", py + " -X utf8 ./stage -v", nil},
		"somebody else's infer":   {"star", "", nil},
		"default interpreter":     {"good", "./stage", nil},
		"no handler.py":           {"none", "", []string{"none has no handler.py, want one with def infer("}},
		"syntax":                  {"syntax", "", []string{"handler: lib/a.py:2: ", "\n    def f(:"}},
		"NUL":                     {"nul", "", []string{"handler: handler.py: ", "null byte"}},
		"no infer":                {"noinfer", "", []string{"handler: handler.py: no infer, want def infer("}},
		"Python's own names":      {"hides", py + " ./stage", []string{"handler: queue.py: it would hide Python's own module of that name, want another name\nemail/__init__.py: it would hide"}},
		"its own stagecoach":      {"sdk", "", []string{"stagecoach is a name that the platform uses"}},
		"its own stage":           {"program", "", []string{"stage is a name that the platform uses"}},
		"package that is not":     {"absent", py + " ./stage", []string{"requirements.txt: pip of ", "exit status 1", "No matching distribution found for no-such-package==1.0"}},
		"no pip":                  {"requires", bare + "/bin/python ./stage", []string{"requirements.txt: ", "bare/bin/python", " has no pip", "apt-get install python3-pip"}},
		"interpreter not there":   {"good", "/nowhere/python ./stage", []string{"the interpreter /nowhere/python is missing", "fprocess"}},
		"interpreter not in PATH": {"good", "no-such-python3 ./stage", []string{"the interpreter no-such-python3 is missing"}},
		"no stage":                {"good", "python3 handler.py", []string{`fprocess: "python3 handler.py", want an interpreter`}},
		"relative interpreter":    {"good", "./venv/bin/python ./stage", []string{"by name or absolute path"}},
		"old":                     {"good", dir + "/old ./stage", []string{"/opt/old (Python 2.7) is too old, want 3.9 or later"}},
		"broken":                  {"good", dir + "/fails ./stage", []string{"exit status 3", "no such machine"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(t, dir, map[string]stack.Function{"f": {Lang: "python3-stage", Handler: tc.handler, FProcess: tc.process}}).Build(t.Context(), "f")
			if len(tc.want) == 0 && err != nil {
				t.Error(err)
			}
			for _, want := range tc.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
			}
		})
	}
}

// TestInterpreter checks that the builder looks for the interpreter where the function's processes
// will.
func TestInterpreter(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a/python3", "b/python3", "b/special"} {
		tree(t, dir, map[string]string{name: "#!/bin/sh\necho 3 12 " + name + "\n"})
		if err := os.Chmod(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", filepath.Join(dir, "b")+":"+os.Getenv("PATH"))
	b := open(t, dir, nil)
	for name, tc := range map[string]struct {
		fn   stack.Function
		want string // the end of the program's path
	}{
		"its own PATH":            {stack.Function{Environment: map[string]string{"PATH": filepath.Join(dir, "none") + ":" + filepath.Join(dir, "a")}}, "a/python3 (Python 3.12)"},
		"ours, where it has none": {stack.Function{FProcess: "special ./stage"}, "b/special (Python 3.12)"},
		"absolute":                {stack.Function{FProcess: filepath.Join(dir, "b/python3") + " ./stage"}, "b/python3 (Python 3.12)"},
	} {
		if py, err := b.python(t.Context(), tc.fn); err != nil || py.what != tc.want {
			t.Errorf("%s: %v, %v, want %s", name, py, err, tc.want)
		}
	}
}

func TestNormalise(t *testing.T) {
	site := filepath.Join(t.TempDir(), "site-packages")
	if err := normalise(site); err != nil {
		t.Errorf("nothing installed: %v", err)
	}
	tree(t, site, map[string]string{
		"a-1.dist-info/RECORD":          "b.py,sha256=x,1\n\"a,b.py\",,\na-1.dist-info/direct_url.json,,\n../../bin/a,sha256=of a path,9\n../../bin/../x,,\n__pycache__/b.pyc,,\na-1.dist-info/RECORD,,\n",
		"a-1.dist-info/direct_url.json": `{"url": "file:///home/me"}`,
		"b.py":                          "", "a,b.py": "", "__pycache__/b.pyc": "", "bin/a": "#!/home/me/python", "bin/own.py": "", "x": "",
		"other/RECORD": "it is no list\"", // belongs to no package
	})
	if err := normalise(site); err != nil {
		t.Fatal(err)
	}
	if got, want := list(t, site), []string{"a,b.py", "a-1.dist-info/RECORD", "b.py", "bin/own.py", "other/RECORD", "x"}; !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	if b, err := os.ReadFile(filepath.Join(site, "a-1.dist-info/RECORD")); err != nil || string(b) != "\"a,b.py\",,\na-1.dist-info/RECORD,,\nb.py,sha256=x,1\n" {
		t.Errorf("RECORD %q, %v", b, err)
	}
	tree(t, site, map[string]string{"b-1.dist-info/RECORD": "\"a"})
	if err := normalise(site); err == nil || !strings.Contains(err.Error(), "b-1.dist-info: RECORD: ") {
		t.Errorf("got %v, want the package's name", err)
	}
}

// FuzzRecord checks that record gives a list of files for any package: sorted, with no file
// outside, and with nothing removed except programs.
func FuzzRecord(f *testing.F) {
	for _, seed := range []string{"", "b.py,sha256=x,1\n", "../../bin/a,,\n", "../../bin/,,\n../../bin/..,,\n", "\"a,\nb\",,\n", "a\n,,\n", "/etc/passwd,,\r\n../x,,"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		site := filepath.Join(t.TempDir(), "site-packages")
		file := filepath.Join(site, "a-1.dist-info/RECORD")
		tree(t, site, map[string]string{"a-1.dist-info/RECORD": text, "b.py": "", "bin/a": ""})
		if record(site, file) != nil {
			return
		}
		if got := list(t, site); !slices.Contains(got, "b.py") || len(got) < 2 {
			t.Errorf("%q: left are %v", text, got)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		rows, err := csv.NewReader(bytes.NewReader(b)).ReadAll()
		if err != nil && !errors.Is(err, csv.ErrFieldCount) || !slices.IsSortedFunc(rows, slices.Compare[[]string]) {
			t.Errorf("%q became %q: %v", text, b, err)
		}
		for _, row := range rows {
			if !filepath.IsLocal(row[0]) {
				t.Errorf("%q: has %q", text, row[0])
			}
		}
	})
}

func TestTail(t *testing.T) {
	var shown bytes.Buffer
	w := &tail{to: &shown}
	for i := range 1000 {
		fmt.Fprintf(w, "line %d\n", i)
	}
	if lines := strings.Split(w.String(), "\n"); len(lines) != tailLines || lines[0] != "line 985" || lines[tailLines-1] != "line 999" {
		t.Errorf("%q", lines)
	}
	if !strings.HasPrefix(shown.String(), "line 0\n") || !strings.HasSuffix(shown.String(), "line 999\n") {
		t.Error("some of the output was not passed on")
	}
}
