package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// identity is the user and groups that a program runs as.
type identity struct {
	uid, gid int
	groups   []int // supplementary groups
	name     string
	home     string
	listed   bool // /etc/passwd has the user
}

// maxAccounts bounds the size in bytes of an image's list of users or groups.
const maxAccounts = 1 << 20

// lookup finds the identity of user in the present root. If the user has no name or home folder
// there, lookup adds them.
func lookup(user string, readOnly bool) (identity, error) {
	who, groups, err := known(user)
	if err == nil {
		who.chooseHome(readOnly)
		err = who.addToLists(groups)
	}
	return who, err
}

// known finds the identity of user in the present root, and returns the content of /etc/group.
func known(user string) (who identity, groups string, err error) {
	var lists [2]string
	for i, file := range []string{passwdFile, groupFile} {
		info, err := os.Stat(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // an image needs no lists
		}
		if err == nil && (!info.Mode().IsRegular() || info.Size() > maxAccounts) {
			err = fmt.Errorf("%s: %v of %d bytes, want a file of at most %d", file, info.Mode(), info.Size(), maxAccounts)
		}
		if err != nil {
			return identity{}, "", err
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return identity{}, "", err
		}
		lists[i] = string(b)
	}
	who, err = identify(user, lists[0], lists[1])
	return who, lists[1], err
}

// identify parses user[:group], names or numbers, with the contents of /etc/passwd and /etc/group.
// An empty user is root.
func identify(user, passwd, group string) (identity, error) {
	name, groupName, explicit := strings.Cut(user, ":")
	if name == "" {
		name = "0"
	}
	id := identity{home: "/"}
	number, numeric := parseID(name)
	account := account(passwd, 7, func(f []string) bool { return f[0] == name || numeric && f[2] == strconv.Itoa(number) })
	switch {
	case account != nil:
		uid, ok := parseID(account[2])
		gid, gok := parseID(account[3])
		if !ok || !gok {
			return id, fmt.Errorf("user %q: /etc/passwd has the numbers %q and %q, want numbers below 4294967295", user, account[2], account[3])
		}
		id.uid, id.gid = uid, gid
		if strings.HasPrefix(account[5], "/") {
			id.home = account[5]
		}
		name = account[0]
		id.name, id.listed = name, true
	case numeric:
		id.uid, id.name = number, userName(number)
	default:
		return id, fmt.Errorf("user %q: the image's /etc/passwd has no %q", user, name)
	}
	if explicit && groupName != "" {
		number, numeric := parseID(groupName)
		g := accountOf(group, groupName)
		if g != nil {
			number, numeric = parseID(g[2])
		}
		if !numeric {
			return id, fmt.Errorf("user %q: the image's /etc/group has no %q", user, groupName)
		}
		id.gid = number
		return id, nil // a group in user replaces the others
	}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) != 4 || !slices.Contains(strings.Split(f[3], ","), name) {
			continue
		}
		if n, ok := parseID(f[2]); ok && len(id.groups) < 1024 {
			id.groups = append(id.groups, n)
		}
	}
	return id, nil
}

// accountOf returns the number of the group with this name.
func accountOf(list, name string) []string {
	return account(list, 4, func(f []string) bool { return f[0] == name })
}

// account returns the fields of the first line that has n fields and is accepted by the given
// function.
func account(list string, n int, is func(fields []string) bool) []string {
	for line := range strings.Lines(list) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) == n && is(f) {
			return f
		}
	}
	return nil
}

// parseID parses the number of a user or group. The highest number means none and is not valid.
func parseID(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return int(n), err == nil && n < 1<<32-1
}
