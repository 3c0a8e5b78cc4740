package node

import (
	"slices"
	"strings"
)

// Feature names what daemons of the previous release do not understand. A daemon refuses orders
// with fields that it does not know. So a Client leaves a new field out, unless the daemon has
// announced the field's feature. A feature may be removed once no release without it is supported.
type Feature string

// FarImages means that [ImageSource] may be on another machine.
const FarImages Feature = "farImages"

// features lists all features of this release, sorted.
func features() []Feature { return []Feature{FarImages} }

// maxFeatures bounds the features of an announcement.
const maxFeatures = 256

// fit returns the order without what a daemon with these features refuses.
func (o Order) fit(knows []Feature) Order {
	if !slices.Contains(knows, FarImages) {
		o.Images.Sources = slices.DeleteFunc(slices.Clone(o.Images.Sources), func(s ImageSource) bool {
			return !strings.HasPrefix(s.Address, "unix:")
		})
	}
	return o
}
