package wire

import (
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// OutOfMemoryOn is in the last line on stderr of a replica that ends because a device has too
// little memory. The device's UUID, a colon, and the wanted and free bytes follow: "out of memory
// on device GPU-5f…: want 2 GiB, 1.5 GiB of 40 GiB free".
const OutOfMemoryOn = "out of memory on device "

// maxMemoryText bounds the text of a lack of memory in bytes. A function may have written it.
const maxMemoryText = 400

// MemoryErrorIn returns the lack of memory that a replica's last line on stderr reports, or nil if
// the line has no [OutOfMemoryOn].
func MemoryErrorIn(line string) *task.MemoryError {
	if !strings.Contains(line, OutOfMemoryOn) {
		return nil
	}
	return NewMemoryError(line)
}

// NewMemoryError returns the error for a call that a replica has answered with [task.OutOfMemory]
// and this message. If the message has [OutOfMemoryOn], the error's text begins there.
func NewMemoryError(message string) *task.MemoryError {
	if at := strings.Index(message, OutOfMemoryOn); at >= 0 {
		message = message[at:]
	}
	text := strings.ToValidUTF8(message[:min(len(message), maxMemoryText)], "")
	devices := deviceIDs(text)
	slices.Sort(devices)
	return &task.MemoryError{Devices: slices.Compact(devices), Text: text}
}

// deviceIDs returns the words of a text that are UUIDs of GPUs, or of parts of GPUs. Every stage
// binary has this code, so it does without regular expressions.
func deviceIDs(text string) (ids []string) {
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return !strings.ContainsRune(idRunes, r) }) {
		word = strings.TrimRight(word, "-/")
		kind, id, _ := strings.Cut(word, "-")
		if (kind == "GPU" || kind == "MIG") && id != "" && strings.Contains(alphanumeric, id[:1]) {
			ids = append(ids, word)
		}
	}
	return ids
}

// The characters of UUIDs.
const (
	alphanumeric = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	idRunes      = alphanumeric + "-/"
)
