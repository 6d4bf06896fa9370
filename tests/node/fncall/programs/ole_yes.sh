# verdict: OLE
yes
