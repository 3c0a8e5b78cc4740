package sandbox_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestGuessChoosesTheTellingName checks folders with several programs: Guess must choose the only
// one with a telling name. If none or several have one, the error must name all programs. A single
// program is chosen whatever its name is.
func TestGuessChoosesTheTellingName(t *testing.T) {
	t.Parallel()
	const script, text, elf = "#!/bin/sh\n", "text", "\x7fELF…"
	type file struct {
		text string
		mode os.FileMode
	}
	x := func(text string) file { return file{text, 0o755} }
	plain := file{text, 0o644}
	many := map[string]file{}
	for i := range 23 {
		many[fmt.Sprintf("p%02d", i)] = x(elf)
	}
	for name, tc := range map[string]struct {
		files map[string]file
		want  sandbox.Guess // without why
		err   string
	}{
		"nothing":                  {nil, sandbox.Guess{}, ""},
		"no program":               {map[string]file{"data.bin": plain, "README.md": plain, "util.py": plain, "odd": x(text), ".hidden": x(script), "lib.so.1.2": x(elf), "a b": x(script)}, sandbox.Guess{}, ""},
		"one executable":           {map[string]file{"tool": x(elf), "data": plain, "util.py": plain}, sandbox.Guess{Process: "./tool"}, ""},
		"one script":               {map[string]file{"lines.sh": x(script)}, sandbox.Guess{Process: "./lines.sh"}, ""},
		"a server":                 {map[string]file{"server": x(elf), "help.sh": x(script)}, sandbox.Guess{Process: "./server", HTTP: true}, ""},
		"a server in Python":       {map[string]file{"server.py": plain, "util.py": plain}, sandbox.Guess{Process: "python3 server.py", HTTP: true}, ""},
		"Python":                   {map[string]file{"index.py": plain, "util.py": plain}, sandbox.Guess{Process: "python3 index.py"}, ""},
		"Python with its own line": {map[string]file{"main.py": x("#!/usr/bin/env python3\n")}, sandbox.Guess{Process: "./main.py"}, ""},
		"executable without line":  {map[string]file{"handler.py": x(text)}, sandbox.Guess{Process: "python3 handler.py"}, ""},
		"the image's name":         {map[string]file{"words": x(elf), "helper": x(elf)}, sandbox.Guess{Process: "./words"}, ""},
		"several":                  {map[string]file{"a": x(elf), "b.sh": x(script)}, sandbox.Guess{}, "several programs: ./a, ./b.sh"},
		"very many":                {many, sandbox.Guess{}, ", ./p19 and 3 more"},
		"several that tell":        {map[string]file{"index.py": plain, "main.py": plain, "c": x(elf)}, sandbox.Guess{}, "several programs: ./c, python3 index.py, python3 main.py"},
		"a stage":                  {map[string]file{"stage": x(script), "other": x(script), "index.py": plain}, sandbox.Guess{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			folder := filepath.Join(dir, "example", "words", "0.1.0")
			if err := os.MkdirAll(folder, 0o755); err != nil {
				t.Fatal(err)
			}
			for name, f := range tc.files {
				if err := os.WriteFile(filepath.Join(folder, name), []byte(f.text), f.mode); err != nil {
					t.Fatal(err)
				}
			}
			got, err := sandbox.Images{Dir: dir}.Guess("example/words:0.1.0")
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Fatalf("error %v, want %q", err, tc.err)
			}
			if (got.Process != "") != (got.Why != "") {
				t.Errorf("%+v, want a reason with a guess", got)
			}
			if got.Why = ""; got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}
