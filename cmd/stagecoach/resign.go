package main

import "fmt"

// successor returns a control plane that could lead in place of this one: it reaches nodes, and
// lacks no secrets.
func successor(others []controlPlane) (is controlPlane, ok bool) {
	for _, is := range others {
		if is.Reaches > 0 && is.Lacking == 0 && !is.Leads {
			return is, true
		}
	}
	return is, false
}

// reaches returns how many nodes on other machines are connected.
func (c *controls) reaches() int {
	if c.u.nodes.far == nil {
		return 0
	}
	return c.u.nodes.far.tunnel.Stats().Connections
}

// cutOff returns how many nodes on other machines are heard, if this process leads and reaches none
// of them. Otherwise it returns 0.
func (c *controls) cutOff() (heard int) {
	d := c.u.nodes.joined.Load()
	if d == nil || !c.u.leading.acts() {
		return 0
	}
	for _, n := range d.Clients() {
		if n.Far() {
			return 0
		}
	}
	for _, a := range d.Away() {
		if a.Heard {
			heard++
		}
	}
	return heard
}

// resign ends the lead of this process if it reaches no node and another control plane does. A
// wrong rule of a firewall at one machine would otherwise stop all functions.
func (c *controls) resign() {
	heard := c.cutOff()
	if heard == 0 {
		return
	}
	to, ok := successor(c.others())
	if !ok {
		return
	}
	select {
	case c.resigns <- fmt.Errorf("%w: it hears %d nodes and reaches none of them, but control plane %s reaches %d", errAgain, heard, to.Name, to.Reaches):
	default: // it has been said
	}
}
