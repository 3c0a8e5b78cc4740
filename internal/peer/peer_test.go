package peer

import (
	"net/http"
	"testing"
)

func TestClientIgnoresUntrustedProxies(t *testing.T) {
	proxies, err := ParseProxies([]string{"10.0.0.0/8", "192.0.2.7", "fd00::/8", "::ffff:172.16.0.0/108"})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		remote    string
		forwarded []string
		want      string
	}{
		"no proxy":                    {"203.0.113.5:80", nil, "203.0.113.5"},
		"no proxy that is trusted":    {"203.0.113.5:80", []string{"198.51.100.1"}, "203.0.113.5"},
		"a proxy that says nothing":   {"10.1.1.1:80", nil, "10.1.1.1"},
		"a proxy":                     {"10.1.1.1:80", []string{"198.51.100.1"}, "198.51.100.1"},
		"what the client made up":     {"10.1.1.1:80", []string{"198.51.100.9, 198.51.100.1"}, "198.51.100.1"},
		"two proxies":                 {"10.1.1.1:80", []string{"198.51.100.9,198.51.100.1 , 192.0.2.7"}, "198.51.100.1"},
		"two lines":                   {"10.1.1.1:80", []string{"198.51.100.9", "198.51.100.1", "10.2.2.2"}, "198.51.100.1"},
		"proxies alone":               {"10.1.1.1:80", []string{"10.3.3.3, 10.2.2.2"}, "10.3.3.3"},
		"no address":                  {"10.1.1.1:80", []string{"198.51.100.9, unknown, 10.2.2.2"}, "10.2.2.2"},
		"an empty entry":              {"10.1.1.1:80", []string{""}, "10.1.1.1"},
		"with a port":                 {"10.1.1.1:80", []string{"198.51.100.1:4711"}, "198.51.100.1"},
		"IPv6 is one per network":     {"[2001:db8:1:2:3::4]:80", nil, "2001:db8:1:2::"},
		"IPv6 through a proxy":        {"[fd00::1]:80", []string{"[2001:db8:1:2::9]:80"}, "2001:db8:1:2::"},
		"IPv6 without a port":         {"[fd00::1]:80", []string{"2001:db8:1:2::9"}, "2001:db8:1:2::"},
		"IPv4 in IPv6":                {"[::ffff:10.1.1.1]:80", []string{"::ffff:198.51.100.1"}, "198.51.100.1"},
		"a proxy as IPv4 in IPv6":     {"172.16.9.9:80", []string{"198.51.100.1"}, "198.51.100.1"},
		"a zone":                      {"[fe80::1%eth0]:80", nil, "fe80::"},
		"a connection without either": {"@", []string{"198.51.100.1"}, "invalid IP"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &http.Request{RemoteAddr: tc.remote, Header: http.Header{"X-Forwarded-For": tc.forwarded}}
			if got := proxies.Client(r).String(); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}

func TestParseProxiesRefusesInvalidAddresses(t *testing.T) {
	for _, s := range []string{"", "10.0.0.0/33", "proxy.example", "10.0.0.1:80", "fe80::1%eth0", "::ffff:0.0.0.0/90"} {
		if p, err := ParseProxies([]string{s}); err == nil {
			t.Errorf("%q: %v, want an error", s, p)
		}
	}
}
