package pipeline

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// probes checks OpenFaaS's annotations for readiness and health probes of functions that speak
// HTTP. The function's watchdog reads them.
func (p *parser) probes(annotations map[string]string) {
	for _, probe := range []string{"ready", "health"} {
		for _, name := range []string{"path", "initialDelay", "periodSeconds"} {
			key := "com.openfaas." + probe + ".http." + name
			v, there := annotations[key]
			if !there {
				continue
			}
			p.path = fmt.Sprintf("annotations[%q]", key)
			if name != "path" {
				p.wait(v, 0)
			} else if !strings.HasPrefix(v, "/") || strings.ContainsAny(v, " \t\r\n\x00") {
				p.fail(p.path, strconv.Quote(v), "a path that starts with a slash, such as /_/"+probe)
			}
		}
	}
}

// wait reads a duration that may be zero.
func (p *parser) wait(v string, fallback time.Duration) time.Duration {
	if d, err := time.ParseDuration(strings.TrimSpace(v)); err == nil && d == 0 {
		return 0
	}
	return p.duration(v, fallback)
}
