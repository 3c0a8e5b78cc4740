package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// PrintLogs prints a line of text for each line of JSON.
func PrintLogs(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var l struct {
			Instance, Text string
			Timestamp      time.Time
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return fmt.Errorf("logs: %.200q: %w", lines.Text(), err)
		}
		if _, err := fmt.Fprintf(out, "%s %s %s\n", l.Timestamp.Format(time.RFC3339), l.Instance, strings.TrimRight(l.Text, "\n")); err != nil {
			return err
		}
	}
	return lines.Err()
}

// Stream sends a request whose answer may take any time. It returns the answer with its body
// unread.
func (c *Client) Stream(ctx context.Context, method, path string, header http.Header, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, body)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, header)
	if c.User != "" {
		req.SetBasicAuth(c.User, c.Pass)
	}
	resp, err := (&http.Client{Transport: c.HTTP.Transport}).Do(req)
	if err != nil {
		return nil, unreachable(err)
	}
	return resp, nil
}

// Refused is an error with the server's message unless the status is 2xx.
func Refused(resp *http.Response, what string) error {
	if resp.StatusCode < 300 {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	a := Answer{Status: resp.StatusCode, Body: b}
	if after := resp.Header.Get("Retry-After"); after != "" {
		what += " (again after " + after + " s)"
	}
	return errors.Join(a.Unexpected(what), err)
}

// Metric returns a sample of a metric. It returns the sum of all samples if the prefix fits
// several.
func (c *Client) Metric(ctx context.Context, prefix string) (float64, error) {
	a, err := c.Do(ctx, "GET", "/metrics", "", nil)
	if err != nil {
		return 0, err
	}
	sum, found := 0.0, false
	for line := range strings.Lines(string(a.Body)) {
		if !strings.HasPrefix(line, prefix) {
			continue
		}
		fields := strings.Fields(line)
		v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			return 0, fmt.Errorf("metric %q: %w", line, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		return 0, fmt.Errorf("no metric %s at %s/metrics", prefix, c.Base)
	}
	return sum, nil
}
