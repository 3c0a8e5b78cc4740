package keysmanager

import (
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// Types of package resources that appear in a Config or an Inventory. Callers of this package use
// these names.
type (
	// Accounts assigns the users that processes run as.
	Accounts = resources.Accounts
	// Networks makes network namespaces for processes.
	Networks = resources.Networks
	// Groups makes the cgroups of processes.
	Groups = resources.Groups
	// Group is a cgroup.
	Group = resources.Group
	// GroupLimits bound a cgroup.
	GroupLimits = resources.Limits
	// GroupUsage is what the processes of a cgroup have used.
	GroupUsage = resources.GroupUsage
	// Usage is what a replica or zygote uses of its node.
	Usage = resources.Usage
	// Device is an accelerator.
	Device = resources.Device
	// DeviceInfo is a device and the replicas that use it.
	DeviceInfo = resources.DeviceInfo
)

// Threshold is the share of the node's memory that may be in use before idle zygotes are evicted.
const Threshold = cache.Threshold

// Errors of package resources that callers may want to tell apart.
var (
	ErrDevice       = resources.ErrDevice
	ErrModelMissing = resources.ErrModelMissing
)

// CheckModel checks the files of a model below an image's root, as a start does before it loads
// them.
func CheckModel(root, model string) error { return resources.CheckModel(root, model) }
