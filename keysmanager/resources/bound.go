package resources

import "github.com/stagecoach-serving/stagecoach/keysmanager/cache"

// The names of bounds, as Inventory.Bound of package keysmanager has them.
const (
	BoundOwn     = "--memory"
	BoundCgroup  = "cgroup"
	BoundMachine = "machine"
)

// Bound is one of the limits on what a node may use.
type Bound = cache.Bound
