package resources

// The shares of a bound between which memory is kept.
const (
	// Threshold is the share of the node's memory that may be in use before idle zygotes are evicted
	// (QUART, §5).
	Threshold = 0.85
	// CalmBelow is the share at which an eviction that has begun ends, so that one byte more does not
	// begin the next.
	CalmBelow = 0.80
)

// The names of bounds, as Inventory.Bound of package keysmanager has them.
const (
	BoundOwn     = "--memory"
	BoundCgroup  = "cgroup"
	BoundMachine = "machine"
)

// Bound is one of the limits on what a node may use, in bytes.
type Bound struct {
	Name  string
	Total int64
	Used  int64 // counted as the limit counts, without what gives way when memory is short
}

// Below returns how many bytes are free below a share of the bound; negative: the share is passed.
func (b Bound) Below(share float64) int64 { return int64(float64(b.Total)*share) - b.Used }
