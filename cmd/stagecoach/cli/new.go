package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image/builder"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// newStack is the stack file that `stagecoach new` writes if there is none.
const newStack = `version: 1.0
provider:
  name: openfaas
  gateway: http://127.0.0.1:8080
functions:
`

// newName matches names that a function, its folder and its image can all have.
var newName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// New makes a function's folder from a template, and its entry in the stack file. It needs no
// gateway.
func New(_ context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("new", flag.ContinueOnError)
	lang := flags.String("lang", "", "the template: go-stage, onnx-stage, python3-stage, or one that was pulled into the folder template")
	prefix := flags.String("prefix", "", "beginning of the image's name, such as example or registry.example/team")
	file := flags.String("f", "", "stack file, created if there is none; default stack.yml or stack.yaml")
	name, err := console.OneName(flags, args)
	if err != nil {
		return err
	}
	if !newName.MatchString(name) {
		return fmt.Errorf("new: got name %q, want lower-case letters, digits and '-' inside, at most 63", name)
	}
	if *lang == "" {
		return fmt.Errorf("new: got no --lang, want go-stage, onnx-stage or python3-stage: stagecoach new %s --lang go-stage", name)
	}
	at := stackFile(*file)
	before, err := os.ReadFile(at)
	if errors.Is(err, fs.ErrNotExist) {
		before, err = nil, nil
	}
	if err != nil {
		return fmt.Errorf("new: stack file: %w", err)
	}
	entry := fmt.Sprintf("  %s:\n    lang: %s\n    handler: ./%[1]s\n    image: %[3]s%[1]s:latest\n", name, *lang, imagePrefix(*prefix))
	added, err := stackWith(at, string(before), name, entry)
	if err == nil && added == "" {
		_, err = os.Stat(name)
		if err == nil {
			_, err = fmt.Fprintf(out, "%s: is there already, and in %s; nothing was changed\n", name, at)
			return err
		}
		err = fmt.Errorf("%s has the function %q already, but its folder does not exist: remove it from the file, or restore the folder: %w", at, name, err)
	}
	if err != nil {
		return fmt.Errorf("new: %w", err)
	}
	if err := newFolder(name, *lang); err != nil {
		return fmt.Errorf("new: %w", err)
	}
	if err := appendTo(at, added); err != nil {
		return errors.Join(fmt.Errorf("new: %w", err), os.RemoveAll(name))
	}
	fmt.Fprintf(out, "%s: made from %s\n%s: has it now\n", name, *lang, at)
	console.Progress("next: stagecoach build -f %s && stagecoach deploy -f %[1]s", at)
	return nil
}

// imagePrefix returns prefix with a slash behind it, unless it is empty.
func imagePrefix(prefix string) string {
	if prefix = strings.TrimSuffix(prefix, "/"); prefix == "" {
		return ""
	}
	return prefix + "/"
}

// stackWith returns the text to append to a stack file, so that the file has the entry of a
// function. before is the file's present text, which may be empty. added is empty if the file
// already has this function. A different function of the same name is an error.
func stackWith(file, before, name, entry string) (added string, err error) {
	if strings.TrimSpace(before) == "" {
		return newStack + entry, nil
	}
	old, err := stack.Parse(file, []byte(before), os.LookupEnv)
	if err != nil {
		return "", fmt.Errorf("stack file: %w", err)
	}
	if there, exists := old.Functions[name]; exists {
		alone, err := stack.Parse(file, []byte(newStack+entry), os.LookupEnv)
		if err != nil {
			return "", err
		}
		if want := alone.Functions[name]; there.Lang == want.Lang && there.Image == want.Image && filepath.Clean(there.Handler) == filepath.Clean(want.Handler) {
			return "", nil
		}
		return "", fmt.Errorf("%s has a function %q already, with lang %s, handler %s and image %s: choose another name, or take it out of the file", file, name, there.Lang, there.Handler, there.Image)
	}
	if !strings.HasSuffix(before, "\n") {
		added = "\n"
	}
	if old.Functions == nil && !strings.Contains("\n"+before, "\nfunctions:") {
		added += "functions:\n"
	}
	added += entry
	next, err := stack.Parse(file, []byte(before+added), os.LookupEnv)
	if err == nil { // the file now has the function of the entry, and nothing else has changed
		if _, is := next.Functions[name]; is {
			delete(next.Functions, name)
			if len(next.Functions) == len(old.Functions) {
				next.Functions = old.Functions
			}
		}
	}
	if err != nil || !reflect.DeepEqual(old, next) {
		return "", fmt.Errorf("%s does not end with its functions, indented by two spaces, so no function can be added at the end; "+
			"name another file with -f, or add this to its functions:\n%s", file, strings.TrimSuffix(entry, "\n"))
	}
	return added, nil
}

// newFolder makes a function's folder from the template of a lang. After an error it leaves no
// folder.
func newFolder(name, lang string) error {
	t, _, err := builder.Template(&stack.File{}, lang)
	if err != nil {
		return err
	}
	if t, err = fs.Sub(t, "function"); err != nil {
		return err
	}
	if _, err := fs.Stat(t, "."); err != nil {
		return fmt.Errorf("template %q has no folder function, want one with the first files of a function: %w", lang, err)
	}
	if _, err := os.Lstat(name); err == nil {
		return fmt.Errorf("%s is there already: choose another name, or remove it (rm -r %[1]s) to start again", name)
	}
	tmp, err := os.MkdirTemp(".", ".stagecoach-new-")
	if err != nil {
		return err
	}
	folder := filepath.Join(tmp, name)
	if err = os.CopyFS(folder, t); err == nil {
		err = os.Rename(folder, name)
	}
	return errors.Join(err, os.RemoveAll(tmp))
}

// appendTo adds text to the end of a file. It creates the file if there is none.
func appendTo(file, text string) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
