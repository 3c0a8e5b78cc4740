package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
)

// DefaultBinDir is the folder in which plugins are by convention.
const DefaultBinDir = "/opt/cni/bin"

// Config says which plugins connect replicas.
type Config struct {
	// Conf is a .conflist file, a .conf or .json file, or a folder in which the first of these files
	// in the order of names counts.
	Conf    string
	BinDirs []string // folders of plugins, searched in this order
}

// BinDirs splits a list of folders, which has the form of the variable CNI_PATH.
func BinDirs(list string) []string {
	return slices.DeleteFunc(filepath.SplitList(list), func(s string) bool { return s == "" })
}

// load reads a configuration, and returns its file too.
func load(conf string) (list *libcni.NetworkConfigList, file string, err error) {
	file = conf
	if info, err := os.Stat(conf); err != nil {
		return nil, file, err
	} else if info.IsDir() {
		files, err := libcni.ConfFiles(conf, []string{".conflist", ".conf", ".json"})
		if err != nil {
			return nil, file, err
		}
		if len(files) == 0 {
			return nil, file, fmt.Errorf("%s: no .conflist, .conf or .json file is there, want one", conf)
		}
		file = slices.Min(files)
	}
	if list, err = parse(file); err != nil {
		return nil, file, fmt.Errorf("%s: %w", file, err)
	}
	return list, file, nil
}

// parse reads a file. The bytes of the list have all that it says, so that these alone are enough
// for a DEL.
func parse(file string) (*libcni.NetworkConfigList, error) {
	var list *libcni.NetworkConfigList
	if strings.HasSuffix(file, ".conflist") {
		var err error
		if list, err = libcni.NetworkConfFromFile(file); err != nil {
			return nil, err
		}
	} else {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		one, err := libcni.NetworkPluginConfFromBytes(b)
		if err != nil {
			return nil, err
		}
		list = &libcni.NetworkConfigList{Name: one.Network.Name, CNIVersion: one.Network.CNIVersion, Plugins: []*libcni.PluginConfig{one}}
	}
	if list.Name == "" {
		return nil, errors.New(`it has no "name", want the name of a network`)
	}
	whole := struct {
		Name         string            `json:"name"`
		CNIVersion   string            `json:"cniVersion,omitempty"`
		DisableCheck bool              `json:"disableCheck,omitempty"`
		Inlined      bool              `json:"loadOnlyInlinedPlugins"`
		Plugins      []json.RawMessage `json:"plugins"`
	}{Name: list.Name, CNIVersion: list.CNIVersion, DisableCheck: list.DisableCheck, Inlined: true}
	for _, p := range list.Plugins {
		whole.Plugins = append(whole.Plugins, p.Bytes)
	}
	b, err := json.Marshal(whole)
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(b)
}

// Configuration is the Problem.What of the configuration itself.
const Configuration = "configuration"

// Problem is a part of a configuration that was looked at.
type Problem struct {
	What  string // Configuration, or the name of a plugin
	Found string // where it is, or what is wrong
	OK    bool
}

// Check looks at a configuration and the plugins that it names. It asks plugins for the versions
// that they support, and starts nothing else.
func Check(ctx context.Context, c Config) (out []Problem) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	list, file, err := load(c.Conf)
	if err != nil {
		return []Problem{{What: Configuration, Found: err.Error()}}
	}
	out = append(out, Problem{What: Configuration, OK: true, Found: fmt.Sprintf("%s: network %s", file, list.Name)})
	runs := libcni.NewCNIConfig(c.BinDirs, &executor{wait: wait})
	for _, name := range programs(list) {
		p := Problem{What: name}
		if p.Found, err = invoke.FindInPath(name, c.BinDirs); err != nil {
			p.Found = fmt.Sprintf("no %s in %s", name, strings.Join(c.BinDirs, ", "))
			out = append(out, p)
			continue
		}
		p.OK = true
		one := &libcni.PluginConfig{}
		for _, configured := range list.Plugins {
			if configured.Network.Type == name {
				one = configured
			}
		}
		if one.Network != nil { // an address plugin is not asked: its caller is
			network := *one.Network
			network.CNIVersion = list.CNIVersion
			if _, err := runs.ValidateNetwork(ctx, &libcni.PluginConfig{Network: &network}); err != nil {
				p.Found, p.OK = fmt.Sprintf("%s: %v", p.Found, err), false
			}
		}
		out = append(out, p)
	}
	return out
}

// programs returns the names of all plugins of a list, also those that assign addresses.
func programs(list *libcni.NetworkConfigList) (out []string) {
	add := func(name string) {
		if name != "" && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	for _, p := range list.Plugins {
		add(p.Network.Type)
		add(p.Network.IPAM.Type)
	}
	return out
}

// check returns what Check has found wrong as an error, or nil.
func check(ctx context.Context, c Config) error {
	var errs []error
	for _, p := range Check(ctx, c) {
		if p.OK {
			continue
		}
		if p.What == Configuration {
			return fmt.Errorf("--cni-conf %s: %s", c.Conf, p.Found)
		}
		errs = append(errs, fmt.Errorf("plugin %s of --cni-conf %s: %s; install it, or name its folder with --cni-bin-dir", p.What, c.Conf, p.Found))
	}
	return errors.Join(errs...)
}
