package bench

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// PSS returns the proportional set sizes of processes in bytes, added up: pages that several of them share count once in all.
func PSS(pids ...int) (int64, error) {
	sum := int64(0)
	for _, pid := range pids {
		kb, err := pssOf(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, err
		}
		sum += kb << 10
	}
	return sum, nil
}

func pssOf(file string) (kb int64, err error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if rest, ok := strings.CutPrefix(sc.Text(), "Pss:"); ok {
			_, err := fmt.Sscan(rest, &kb)
			return kb, err
		}
	}
	return 0, fmt.Errorf("%s: no line Pss:", file)
}
