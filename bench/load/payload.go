package load

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"text/template"
)

// Body defines the requests' bodies by one of Text, File, Folder, Random and Template. Without any,
// bodies are empty.
type Body struct {
	Text   string `yaml:"text"`
	File   string `yaml:"file"`
	Folder string `yaml:"folder"` // sends its files, one per request
	// order of the files: turn (the default, by name) or random.
	Order  string `yaml:"order"`
	Random int    `yaml:"random"` // number of random bytes, new for each request
	// text/template with {{counter}}, {{words 5}} and {{int 1 10}}.
	Template    string `yaml:"template"`
	ContentType string `yaml:"contentType"` // default: detected
}

// Bounds in bytes: of one body, and of all files of a folder.
const (
	maxBody   = 64 << 20
	maxFolder = 512 << 20
)

// payload returns a body per call. Only one goroutine may use it.
type payload func() (body []byte, contentType string, err error)

// payload reads the files and returns the source of bodies.
func (b Body) payload(seed uint64) (payload, error) {
	set := 0
	for _, s := range []bool{b.Text != "", b.File != "", b.Folder != "", b.Random != 0, b.Template != ""} {
		if s {
			set++
		}
	}
	if set > 1 {
		return nil, errors.New("want one of text, file, folder, random and template")
	}
	if b.Order != "" && (b.Folder == "" || b.Order != "turn" && b.Order != "random") {
		return nil, fmt.Errorf("order %q, want turn or random, of a folder", b.Order)
	}
	r := rand.New(rand.NewPCG(seed, 1))
	switch {
	case b.File != "":
		body, err := readBody(b.File)
		return b.same(body, b.File), err
	case b.Folder != "":
		return b.folder(r)
	case b.Random != 0:
		if b.Random < 0 || b.Random > maxBody {
			return nil, fmt.Errorf("random: %d bytes, want 1 to %d", b.Random, maxBody)
		}
		var key [32]byte
		binary.LittleEndian.PutUint64(key[:], seed)
		chance := rand.NewChaCha8(key)
		return func() ([]byte, string, error) {
			out := make([]byte, b.Random)
			_, _ = chance.Read(out) // never fails
			return out, b.contentType(nil, ""), nil
		}, nil
	case b.Template != "":
		return b.template(r)
	default:
		return b.same([]byte(b.Text), ""), nil
	}
}

func (b Body) same(body []byte, name string) payload {
	ct := b.contentType(body, name)
	return func() ([]byte, string, error) { return body, ct, nil }
}

func readBody(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	body, err := io.ReadAll(io.LimitReader(f, maxBody+1))
	if err == nil && len(body) > maxBody {
		err = fmt.Errorf("%s: want at most %d bytes", name, maxBody)
	}
	return body, err
}

func (b Body) folder(r *rand.Rand) (payload, error) {
	entries, err := os.ReadDir(b.Folder) // sorted by name
	if err != nil {
		return nil, err
	}
	var all []payload
	total := 0
	for _, e := range entries {
		name := filepath.Join(b.Folder, e.Name())
		if info, err := os.Stat(name); err != nil || !info.Mode().IsRegular() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		body, err := readBody(name)
		if err != nil {
			return nil, err
		}
		if total += len(body); total > maxFolder {
			return nil, fmt.Errorf("%s: more than %d bytes", b.Folder, maxFolder)
		}
		all = append(all, b.same(body, name))
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no files", b.Folder)
	}
	i := -1
	return func() ([]byte, string, error) {
		if i = (i + 1) % len(all); b.Order == "random" {
			i = r.IntN(len(all))
		}
		return all[i]()
	}, nil
}

var words = strings.Fields("stage coach horse road inn mail rain bridge river hill lamp night wheel dust north letter driver" +
	" valley stone clock market winter harbour garden silver forest paper window copper meadow")

func (b Body) template(r *rand.Rand) (payload, error) {
	n := 0
	t, err := template.New("body").Funcs(template.FuncMap{
		"counter": func() int { return n },
		"words": func(k int) (string, error) {
			if k < 0 || k > 1_000_000 {
				return "", fmt.Errorf("words %d, want 0 to 1000000", k)
			}
			var out []string
			for range k {
				out = append(out, words[r.IntN(len(words))])
			}
			return strings.Join(out, " "), nil
		},
		"int": func(from, to int) (int, error) {
			if to < from || to-from < 0 || to-from+1 <= 0 {
				return 0, fmt.Errorf("int %d %d, want two ascending numbers", from, to)
			}
			return from + r.IntN(to-from+1), nil
		},
	}).Parse(b.Template)
	if err != nil {
		return nil, err
	}
	next := func() ([]byte, string, error) {
		var out bytes.Buffer
		err := t.Execute(&out, nil)
		n++
		return out.Bytes(), b.contentType(out.Bytes(), ""), err
	}
	_, _, err = next() // so that faults show before the run
	n = 0
	return next, err
}

// contentType returns the configured type. Otherwise it guesses from the extension of the file's
// name, and then from the content: JSON, or what browsers would guess.
func (b Body) contentType(body []byte, name string) string {
	if b.ContentType != "" {
		return b.ContentType
	}
	if byName := mime.TypeByExtension(filepath.Ext(name)); byName != "" {
		return byName
	}
	if b.Random > 0 || len(body) == 0 {
		return "application/octet-stream"
	}
	if start := bytes.TrimLeft(body, " \t\r\n"); len(start) > 0 && (start[0] == '{' || start[0] == '[') && json.Valid(body) {
		return "application/json"
	}
	return http.DetectContentType(body)
}
