package watchdog

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

const someImage = `STAGECOACH_IMAGE={"Name":"a/b:1","Root":"/images/b","Entrypoint":["/main","-v"],"Env":["A=image","B=image"]}`

// given turns variables into those of a function's program, except for the platform's.
func given(env []string) (out []string) {
	for _, kv := range env {
		if !strings.HasPrefix(kv, "STAGECOACH_") {
			kv = wire.EnvProgram + kv
		}
		out = append(out, kv)
	}
	return out
}

func TestParseChoosesModeAndDefaults(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		env   []string
		check func(config) bool
	}{
		"an entrypoint is a server": {nil, func(c config) bool {
			return c.mode == modeHTTP && slices.Equal(c.process, []string{"/main", "-v"}) && c.slots == slotsHTTP && c.upstream == nil && c.exec == 0
		}},
		"fprocess is a command": {[]string{"fprocess=sort  -n"}, func(c config) bool {
			return c.mode == modeStreaming && slices.Equal(c.process, []string{"sort", "-n"}) && c.slots == slotsFork && c.contentType == "application/octet-stream"
		}},
		"its old name":         {[]string{"function_process=cat"}, func(c config) bool { return slices.Equal(c.process, []string{"cat"}) }},
		"fprocess as a server": {[]string{"fprocess=./x", "mode=http"}, func(c config) bool { return c.mode == modeHTTP && c.process[0] == "./x" }},
		"the function's environment wins": {[]string{"A=function"}, func(c config) bool {
			return c.env["A"] == "function" && c.env["B"] == "image"
		}},
		"what the watchdog has is its own": {nil, func(c config) bool { return c.env["LD_PRELOAD"] == "" && c.env["PATH"] == "" }},
		"the platform's words stay": {[]string{"STAGECOACH_SOCKET=3", "STAGECOACH_ENV_STAGECOACH_IMAGE={}"}, func(c config) bool {
			_, found := c.env["STAGECOACH_SOCKET"]
			_, image := c.env["STAGECOACH_IMAGE"]
			return !found && !image
		}},
		"durations": {[]string{"exec_timeout=2", "read_timeout=300ms", "write_timeout=1m"}, func(c config) bool {
			return c.exec == 2*time.Second && c.read == 300*time.Millisecond && c.write == time.Minute
		}},
		"upstream":              {[]string{"upstream_url=http://127.0.0.1:5000/base"}, func(c config) bool { return c.upstream.Host == "127.0.0.1:5000" && c.upstream.Path == "/base" }},
		"ready_path":            {[]string{"ready_path=/up"}, func(c config) bool { return c.ready == "/up" }},
		"the annotation's path": {[]string{"ready_path=/up", "STAGECOACH_READY_PATH=/annotated"}, func(c config) bool { return c.ready == "/annotated" }},
		"health": {[]string{"STAGECOACH_HEALTH=30s,5,/up,down"}, func(c config) bool {
			return c.health == "/up,down" && c.delay == 30*time.Second && c.period == 5*time.Second
		}},
		"health's defaults": {[]string{"STAGECOACH_HEALTH=,,/up"}, func(c config) bool { return c.delay == 0 && c.period == 2*time.Second }},
		"content type":      {[]string{"content_type=text/html"}, func(c config) bool { return c.contentType == "text/html" }},
	} {
		if c, err := parse(append([]string{someImage, "LD_PRELOAD=/ours", "PATH=/ours"}, given(tc.env)...)); err != nil || !tc.check(c) {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
}

func TestParseNamesTheFault(t *testing.T) {
	t.Parallel()
	for want, env := range map[string][]string{
		"started by `stagecoach up`":                         {},
		`mode="lambda", want http, streaming`:                {someImage, "mode=lambda"},
		"health path \"up\", want":                           {someImage, "STAGECOACH_HEALTH=,,up"},
		"com.openfaas.health.http.initialDelay":              {someImage, "STAGECOACH_HEALTH=soon,,/up"},
		"no fprocess":                                        {`STAGECOACH_IMAGE={"Name":"a"}`},
		"exec_timeout":                                       {someImage, "exec_timeout=soon"},
		`ready path "up", want one that starts`:              {someImage, "ready_path=up"},
		"want http://127.0.0.1:PORT":                         {someImage, "upstream_url=127.0.0.1:5000"},
		`host "10.0.0.1", want 127.0.0.1`:                    {someImage, "upstream_url=http://10.0.0.1:5000"},
		"upstream_url=\"https://127.0.0.1:5000\", want http": {someImage, "upstream_url=https://127.0.0.1:5000"},
	} {
		if _, err := parse(given(env)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", env, err, want)
		}
	}
	_, err := parse(given([]string{someImage, "mode=lambda", "exec_timeout=soon", "ready_path=up"}))
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("%v, want all three faults", err)
	}
}

// FuzzParse checks that an environment is either refused or makes a configuration that can run.
func FuzzParse(f *testing.F) {
	f.Add(someImage + "\nmode=http\nupstream_url=http://[::1]:80/%zz\nexec_timeout=1h")
	f.Add(someImage + "\nfprocess= \nready_path=\n=\nmax_inflight=-1")
	f.Fuzz(func(t *testing.T, environ string) {
		c, err := parse(given(strings.Split(environ, "\n")))
		if err != nil {
			return
		}
		if len(c.process) == 0 || c.slots <= 0 || c.exec < 0 || c.read < 0 || c.write < 0 || c.ready != "" && c.ready[0] != '/' {
			t.Errorf("%+v", c)
		}
		if c.upstream != nil && (c.mode != modeHTTP || c.upstream.Port() == "") {
			t.Errorf("upstream %v in mode %s", c.upstream, c.mode)
		}
	})
}

// TestSecretsOfAProgram checks that the folder of the secrets comes from the platform and not from
// the program's environment, because a watchdog that is root could read any folder.
func TestSecretsOfAProgram(t *testing.T) {
	t.Parallel()
	const own = "STAGECOACH_SECRETS=/run/stagecoach/secrets-x/ns/f/set"
	for _, rootfs := range []string{`STAGECOACH_IMAGE={"Name":"a/b:1","Root":"/images/b","Rootfs":true,"Entrypoint":["/main"]}`, someImage} {
		for want, env := range map[string][]string{"": {}, "/run/stagecoach/secrets-x/ns/f/set": {own}} {
			c, err := parse(append(given([]string{rootfs, "secret_mount_path=/root", "STAGECOACH_ENV_STAGECOACH_SECRETS=/root"}), env...))
			if err != nil {
				t.Fatal(err)
			}
			command := c.command()
			got := command.Secrets
			for _, b := range command.Binds {
				if got = b.From; b.To != secretsFolder || !b.Copy || command.Env[envSecrets] != secretsFolder {
					t.Errorf("bind %+v, environment %v", b, command.Env)
				}
			}
			if got != want || len(command.Binds) > 1 {
				t.Errorf("its secrets are %q, %v, want %q", got, command.Binds, want)
			}
		}
	}
}
