package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// terminal is the terminal of this process.
type terminal struct{ in, out *os.File }

// openTerminal returns the terminal behind out and standard input, or nil if they are not one that
// can be drawn on.
func openTerminal(out io.Writer) *terminal {
	f, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "" || os.Getenv("TERM") == "dumb" {
		return nil
	}
	for _, f := range []*os.File{f, os.Stdin} {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
			return nil
		}
	}
	return &terminal{os.Stdin, f}
}

// size returns columns and lines.
func (t *terminal) size() (width, height int) {
	s, err := unix.IoctlGetWinsize(int(t.out.Fd()), unix.TIOCGWINSZ)
	if err != nil || s.Col == 0 || s.Row == 0 {
		return 80, 24
	}
	return int(s.Col), int(s.Row)
}

// raw makes the terminal deliver keys without Enter, and shows another screen without a cursor.
// Ctrl-C stays a signal.
func (t *terminal) raw() (restore func(), err error) {
	fd := int(t.in.Fd())
	before, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, err
	}
	now := *before
	now.Lflag &^= unix.ICANON | unix.ECHO
	// A read returns after a tenth of a second without a key.
	now.Cc[unix.VMIN], now.Cc[unix.VTIME] = 0, 1
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &now); err != nil {
		return nil, err
	}
	_, err = io.WriteString(t.out, "\x1b[?1049h\x1b[?25l")
	return func() {
		_, _ = io.WriteString(t.out, "\x1b[?25h\x1b[?1049l") // an error here has no remedy
		_ = unix.IoctlSetTermios(fd, unix.TCSETS, before)
	}, err
}

// keys waits until somebody types q or standard input ends, and then calls quit. It returns early
// when ctx ends.
func (t *terminal) keys(ctx context.Context, quit func()) {
	b := make([]byte, 16)
	for ctx.Err() == nil {
		n, err := unix.Read(int(t.in.Fd()), b)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || strings.ContainsAny(string(b[:n]), "qQ"):
			quit()
			return
		}
	}
}

// draw shows lines from the top of the screen, in one write, so that nothing flickers.
func (t *terminal) draw(lines []string) error {
	_, err := io.WriteString(t.out, "\x1b[H"+strings.Join(lines, "\x1b[K\r\n")+"\x1b[K\x1b[J")
	return err
}
