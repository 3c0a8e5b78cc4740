package wire

import (
	"regexp"
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

// deviceID matches the UUID of a GPU, or of a part of one.
var deviceID = regexp.MustCompile(`\b(GPU|MIG)-[0-9A-Za-z](?:[0-9A-Za-z/-]*[0-9A-Za-z])?`)

// MemoryErrorIn returns the lack of memory that a replica's last line on stderr tells of, or nil if
// the line has no [OutOfMemoryOn].
func MemoryErrorIn(line string) *task.MemoryError {
	if !strings.Contains(line, OutOfMemoryOn) {
		return nil
	}
	return NewMemoryError(line)
}

// NewMemoryError returns the lack of memory of a call that a replica has answered with
// [task.OutOfMemory] and this message. If the message has [OutOfMemoryOn], the text begins there.
func NewMemoryError(message string) *task.MemoryError {
	if at := strings.Index(message, OutOfMemoryOn); at >= 0 {
		message = message[at:]
	}
	text := strings.ToValidUTF8(message[:min(len(message), maxMemoryText)], "")
	devices := deviceID.FindAllString(text, -1)
	slices.Sort(devices)
	return &task.MemoryError{Devices: slices.Compact(devices), Text: text}
}
