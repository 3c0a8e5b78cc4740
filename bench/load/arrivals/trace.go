package arrivals

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Format is the format of a trace's file; docs/load.md describes each.
type Format string

// The formats.
const (
	Auto Format = "auto" // detected by the first line
	// One count per second: "N", or CSV "SECOND,N,…".
	Counts Format = "counts"
	// One instant per line: seconds or a date, alone or as the first column of CSV.
	Timestamps Format = "timestamps"
	// Counts without their holes (10 minutes of zeros).
	Twitter  Format = "twitter"
	AzureLLM Format = "azure-llm" // CSV "TIMESTAMP,ContextTokens,GeneratedTokens"
	// CSV "SECOND,NAME" with one line per arrival; the trace begins at second 0.
	Instants Format = "instants"
	Mooncake Format = "mooncake" // JSON lines with "timestamp" in milliseconds
	// CSV with one column per minute and one row per function.
	AzureFunction Format = "azure-functions-2019"
	AzureInvoke   Format = "azure-functions-2021" // CSV "app,func,end_timestamp,duration"
)

// Formats returns all formats.
func Formats() []Format {
	return []Format{Auto, Counts, Timestamps, Instants, Twitter, AzureLLM, Mooncake, AzureFunction, AzureInvoke}
}

// InstantsHeader is the first line of a file of [Instants].
const InstantsHeader = "second,name"

// Bounds of a trace's file.
const (
	maxLine     = 4 << 20
	maxArrivals = 50_000_000
	maxBuckets  = 50_000_000
)

// ReadTrace reads a trace, which may be gzipped. column selects a column of counts by its header,
// or a function by the beginning of its name. If column is empty, ReadTrace takes the first column
// of counts, or all functions.
func ReadTrace(r io.Reader, f Format, column string) (Trace, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	if magic, err := b.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(b)
		if err != nil {
			return Trace{}, fmt.Errorf("trace: %w", err)
		}
		b = bufio.NewReaderSize(z, 64<<10)
	}
	if f == "" || f == Auto {
		f = sniff(b)
	}
	p := parser{column: column, bucket: time.Second}
	var line func(fields string) error
	switch f {
	case Counts, Twitter:
		line = p.count
	case Timestamps, AzureLLM:
		line = p.timestamp
	case Instants:
		line = p.named
	case Mooncake:
		line = p.mooncake
	case AzureFunction:
		p.bucket, line = time.Minute, p.minutes
	case AzureInvoke:
		line = p.invocation
	default:
		return Trace{}, fmt.Errorf("trace: format %q, want one of %v", f, Formats())
	}
	sc := bufio.NewScanner(b)
	sc.Buffer(nil, maxLine)
	for p.line = 1; sc.Scan(); p.line++ {
		text := strings.TrimSpace(sc.Text())
		if text == "" || text[0] == '#' {
			continue
		}
		if err := line(text); err != nil {
			return Trace{}, fmt.Errorf("trace, format %s, line %d: %w", f, p.line, err)
		}
		if len(p.times) > maxArrivals {
			return Trace{}, fmt.Errorf("trace: more than %d arrivals", maxArrivals)
		}
	}
	if errors.Is(sc.Err(), bufio.ErrTooLong) {
		return Trace{}, fmt.Errorf("trace, line %d: longer than %d bytes, want text, gzipped or not", p.line, maxLine)
	}
	if err := sc.Err(); err != nil {
		return Trace{}, fmt.Errorf("trace, line %d: %w", p.line, err)
	}
	return p.trace(f)
}

// sniff detects the format by the first kilobytes.
func sniff(b *bufio.Reader) Format {
	head, _ := b.Peek(4 << 10) // shorter at the end of the file
	for text := range strings.Lines(string(head)) {
		text = strings.TrimSpace(text)
		switch {
		case text == "" || text[0] == '#':
			continue
		case text[0] == '{':
			return Mooncake
		case strings.HasPrefix(text, "TIMESTAMP,"):
			return AzureLLM
		case strings.HasPrefix(text, "HashOwner,"):
			return AzureFunction
		case strings.HasPrefix(text, "app,func,"):
			return AzureInvoke
		case text == InstantsHeader:
			return Instants
		case strings.HasPrefix(text, "second"):
			return Counts
		}
		if _, err := strconv.ParseUint(text, 10, 32); err == nil {
			return Counts
		}
		return Timestamps
	}
	return Timestamps
}

type parser struct {
	line   int
	column string
	header []string
	index  int // of the column of counts; 0: unknown yet
	bucket time.Duration
	counts []float64
	first  int             // second of the first count
	next   int             // second of the next count if the line does not say
	times  []time.Duration // relative to any instant
	dates  bool
	origin time.Time
}

// headed reports whether a line is a header, and stores it.
func (p *parser) headed(fields []string) bool {
	if p.header != nil {
		return false
	}
	p.header = fields
	_, err := strconv.ParseFloat(fields[0], 64)
	_, _, dateErr := p.instant(fields[0])
	return err != nil && dateErr != nil
}

func (p *parser) count(text string) error {
	fields := strings.Split(text, ",")
	if p.headed(fields) {
		if p.column == "" {
			return nil
		}
		if p.index = slices.Index(fields, p.column); p.index < 1 {
			return fmt.Errorf("no column %q, want one of %q", p.column, fields[min(1, len(fields)):])
		}
		return nil
	}
	at, value := p.next, fields[0]
	if len(fields) > 1 {
		second, err := strconv.Atoi(fields[0])
		if err != nil || second < 0 || second > 1e10 {
			return fmt.Errorf("second %q, want a whole number of 0 to 1e10", fields[0])
		}
		at = second
		i := max(p.index, 1)
		if i >= len(fields) {
			return fmt.Errorf("%d fields, want at least %d", len(fields), i+1)
		}
		value = fields[i]
	}
	p.next = at + 1
	return p.add(at, value)
}

func (p *parser) add(at int, value string) error {
	n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
	if err != nil || !(n >= 0 && n <= maxRate) {
		return fmt.Errorf("count %q, want a number of 0 to %g", value, maxRate)
	}
	if p.counts == nil {
		p.first = at
	}
	if at < p.first || at-maxBuckets >= p.first {
		return fmt.Errorf("count of %d, want %d, where the file begins, or at most %d after it", at, p.first, maxBuckets)
	}
	for len(p.counts) <= at-p.first {
		p.counts = append(p.counts, 0)
	}
	p.counts[at-p.first] += n
	return nil
}

// instant parses seconds, or a date and time.
func (p *parser) instant(text string) (at time.Duration, date time.Time, err error) {
	if s, err := strconv.ParseFloat(text, 64); err == nil {
		if !(s >= -1e9 && s <= 9e9) {
			return 0, date, fmt.Errorf("%q seconds, want at most 9e9", text)
		}
		return time.Duration(s * float64(time.Second)), date, nil
	}
	// Both accept fractions of seconds.
	for _, layout := range []string{time.DateTime, time.RFC3339} {
		if date, err = time.Parse(layout, text); err == nil {
			return 0, date, nil
		}
	}
	return 0, date, fmt.Errorf("instant %q, want seconds, %q or RFC 3339", text, time.DateTime)
}

func (p *parser) timestamp(text string) error {
	fields := strings.Split(text, ",")
	if p.headed(fields) {
		return nil
	}
	at, date, err := p.instant(strings.TrimSpace(fields[0]))
	if err != nil {
		return err
	}
	if dated := !date.IsZero(); dated {
		if p.times == nil {
			p.origin, p.dates = date, true
		}
		at = date.Sub(p.origin)
	}
	if date.IsZero() == p.dates {
		return fmt.Errorf("instant %q: dates and seconds in one file", fields[0])
	}
	p.times = append(p.times, at)
	return nil
}

// named parses SECOND,NAME. It skips the header, and the arrivals of other names than the column.
func (p *parser) named(text string) error {
	if p.headed(strings.Split(text, ",")) {
		return nil
	}
	second, name, ok := strings.Cut(text, ",")
	at, err := strconv.ParseFloat(second, 64)
	if !ok || err != nil || !(at >= 0 && at <= 9e9) {
		return fmt.Errorf("%q, want SECOND,NAME with a second of 0 to 9e9", text)
	}
	if p.column == "" || name == p.column {
		p.times = append(p.times, time.Duration(math.Round(at*float64(time.Second))))
	}
	return nil
}

func (p *parser) mooncake(text string) error {
	var r struct {
		Timestamp *float64 `json:"timestamp"` // milliseconds
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return err
	}
	if r.Timestamp == nil || !(*r.Timestamp >= 0 && *r.Timestamp <= 9e12) {
		return errors.New(`want a field "timestamp" of 0 to 9e12 milliseconds`)
	}
	p.times = append(p.times, time.Duration(*r.Timestamp*float64(time.Millisecond)))
	return nil
}

func (p *parser) minutes(text string) error {
	fields := strings.Split(text, ",")
	if p.header == nil {
		p.header = fields
		return nil
	}
	const names = 4 // owner, app, function, trigger
	if len(fields) <= names {
		return fmt.Errorf("%d fields, want owner, app, function, trigger and counts", len(fields))
	}
	if !strings.HasPrefix(fields[2], p.column) {
		return nil
	}
	for i, v := range fields[names:] {
		if err := p.add(i, v); err != nil {
			return fmt.Errorf("minute %d: %w", i+1, err)
		}
	}
	return nil
}

func (p *parser) invocation(text string) error {
	fields := strings.Split(text, ",")
	if p.header == nil {
		p.header = fields
		return nil
	}
	if len(fields) != 4 {
		return fmt.Errorf("%d fields, want app, func, end_timestamp, duration", len(fields))
	}
	if !strings.HasPrefix(fields[1], p.column) {
		return nil
	}
	end, err := strconv.ParseFloat(fields[2], 64)
	took, err2 := strconv.ParseFloat(fields[3], 64)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	if !(end-took >= -1e9 && end-took <= 9e9) {
		return fmt.Errorf("begins at %g s, want at most 9e9", end-took)
	}
	p.times = append(p.times, time.Duration((end-took)*float64(time.Second)))
	return nil
}

// trace assembles what was read.
func (p *parser) trace(f Format) (Trace, error) {
	var t Trace
	if len(p.counts) > 0 {
		t.Bucket, t.Counts = p.bucket, p.counts
		if f == Twitter {
			t.Counts = withoutHoles(t.Counts)
		}
		t.Length = time.Duration(len(t.Counts)) * t.Bucket
	} else if n := len(p.times); n > 0 {
		slices.Sort(p.times)
		first := p.times[0]
		if f == Instants {
			first = 0
		}
		for i := range p.times {
			p.times[i] -= first
		}
		t.Times = p.times
		t.Length = cmp.Or(t.Times[n-1]+t.Times[n-1]/time.Duration(n), time.Second)
	}
	if t.Arrivals() == 0 {
		return t, fmt.Errorf("trace: nothing arrives in %d lines (column %q)", p.line-1, p.column)
	}
	return t, nil
}

// hole is how many consecutive zeros mean a gap in the recording, not silence.
const hole = 600

func withoutHoles(counts []float64) []float64 {
	out := make([]float64, 0, len(counts))
	for i := 0; i < len(counts); {
		end := i
		for end < len(counts) && counts[end] == 0 {
			end++
		}
		if end-i < hole {
			out = append(out, counts[i:end]...)
		}
		if end < len(counts) {
			out = append(out, counts[end])
		}
		i = end + 1
	}
	return out
}
