package tensor

// InlineLimit is the size in bytes of an encoded item above which it travels by reference.
const InlineLimit = 64 << 10

// Datatype is a datatype name of the Open Inference Protocol v2: BOOL, UINT8 … UINT64, INT8 …
// INT64, FP16, FP32, FP64, BF16 or BYTES.
type Datatype string

// Tensor is a named array. Data holds the elements row by row, little-endian; for BYTES each
// element is preceded by its length as a 4-byte little-endian integer.
type Tensor struct {
	Name     string
	Datatype Datatype
	Shape    []int64 // every dimension at least 0
	Data     []byte
}

// Item is one element of an activation: Tensors, or Bytes with a ContentType, or a Ref to the
// encoded item.
type Item struct {
	Tensors     []Tensor
	ContentType string
	Bytes       []byte
	Ref         *Ref // if set, the other fields are empty
}

// Ref says where an item's encoded form is stored (see [AppendItem]).
type Ref struct {
	Owner string // the request that owns the blob; dropping an owner drops all its blobs
	Blob  string // unique within the owner
	Size  int64  // bytes
	// Keeper names the node's daemon or the other control plane that keeps the item; zero: the Store
	// keeps the item.
	Keeper
}

// AtControl is the Address of an item that a control plane keeps.
const AtControl = "control"

// Keeper says which node's daemon, or which control plane, keeps an item.
type Keeper struct {
	Node    string // its name
	Address string // host:port where the daemon's tunnel listens, or [AtControl]
	Sum     uint64 // XXH64 of the encoded item
}

// Activation is the output of one stage and input of the next: an ordered list of items.
type Activation []Item

// Part is the part of an input that came from one predecessor. A pipeline's own input comes from
// "".
type Part struct {
	From  string // name of the predecessor stage, without its namespace
	Items Activation
}

// Input is the input of a call of a stage: one part per predecessor, sorted by From.
type Input []Part
