package node

import (
	"crypto/rand"
	"encoding/json"
	"regexp"
	"time"
)

// complainAgain is the time after which both sides log the same fault of announcements again.
const complainAgain = 30 * time.Second

// fault is the latest fault of a node's announcements that was told.
type fault struct {
	said string
	at   time.Time
}

// announcedID finds a daemon's id in an announcement that cannot be decoded.
var announcedID = regexp.MustCompile(`"id"\s*:\s*"([A-Za-z0-9]{1,64})"`)

// distrust handles an announcement that is not believed. Both sides say why. If the daemon was
// believed before, its node leaves until it announces itself without a fault.
func (d *Directory) distrust(name string, data []byte, err error) {
	id := ""
	if found := announcedID.FindSubmatch(data); found != nil {
		id = string(found[1])
	}
	m := d.nodes[name]
	if m != nil && m.leave != nil && id == m.client.Inventory().ID {
		d.left(name, m, Absence{Cause: "its announcement was refused: " + err.Error()})
	}
	now, was, said := time.Now(), d.faults[name], err.Error()
	if was.said == said && now.Sub(was.at) < complainAgain { // it comes every second
		return
	}
	if len(d.faults) >= maxNodes {
		clear(d.faults)
	}
	d.faults[name] = fault{said, now}
	d.cfg.Log.Error("announcement of a node refused", "node", name, "error", err)
	if id != "" {
		complain(d.cfg, name, id, said)
	}
}

// complain tells a daemon why its announcement was refused.
func complain(cfg DirectoryConfig, name, id, cause string) {
	const most = 2048
	epoch, err := epochFunc(cfg.Epoch).now()
	if err != nil {
		return // the control plane that leads complains
	}
	b, err := json.Marshal(Order{V: Version, ID: rand.Text(), To: id, Epoch: epoch, Kind: OrderComplain, Within: time.Second, Cause: cause[:min(len(cause), most)]})
	if err == nil {
		_ = cfg.Bus.Send(name, kindOrder, "", b)
	}
}
