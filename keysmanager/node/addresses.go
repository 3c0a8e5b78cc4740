package node

import "encoding/json"

// Addresses calls f with the address of each daemon that announces one, with each announcement. It
// skips daemons for which skip returns true. f and skip must not block.
func Addresses(bus Bus, skip func(node string) bool, f func(node, address string)) (stop func(), err error) {
	return bus.Listen("", kindInventory, func(name, _ string, data []byte) {
		if skip(name) {
			return
		}
		var inv struct {
			V       int    `json:"v"`
			Address string `json:"address"`
			Gone    bool   `json:"gone"`
		}
		if json.Unmarshal(data, &inv) == nil && inv.V == Version && inv.Address != "" && !inv.Gone {
			f(name, inv.Address)
		}
	})
}
