/*
 * An operating system of 512 bytes, for full VMs that hold nothing of ours: VGA mode 13h, BIOS keys, a PS/2 mouse by the
 * BIOS, and the first serial port.
 *
 *   at start   the screen is red, with a green square of 20 x 20 at 40,20; "boot" goes to the serial port
 *   a key      a blue-ish square of 10 x 10 for each, from left to right at y 100; its character goes to the port
 *   a byte     from the port: as a key, and the port hears it twice
 *   a button   the square at 40,20 becomes yellow (left) or white (right), and green when it is let go
 *   F1         720 x 400 text mode; F2: back to mode 13h and the picture as at start
 *   F3         the last key's character goes to the second sector of the disk, and to the port ("!": it could not)
 *   F4         the character there goes to the port
 *   F5         the size the display likes best goes to the port: 2 bytes of width, 2 of height, high ones first (EDID)
 */
        .code16
        .set    noted, 0x7e00           /* a sector behind this one */
        .globl _start
_start: xorw    %ax, %ax
        movw    %ax, %ds
        movw    %ax, %ss
        movw    $0x7c00, %sp
        movw    $0x00e3, %ax            /* COM1: 9600 8N1 */
        xorw    %dx, %dx
        int     $0x14
again:  call    picture
        movw    $hello, %si
1:      lodsb
        testb   %al, %al
        jz      mouse
        call    put
        jmp     1b

mouse:  movw    $0xc205, %ax            /* a PS/2 mouse with packets of 3 bytes */
        movb    $3, %bh
        int     $0x15
        jc      loop
        push    %ds
        pop     %es
        movw    $moved, %bx
        movw    $0xc207, %ax
        int     $0x15
        movw    $0xc200, %ax
        movb    $1, %bh
        int     $0x15

loop:   sti
        movb    $1, %ah
        int     $0x16
        jz      2f
        xorb    %ah, %ah
        int     $0x16
        cmpb    $0x3b, %ah              /* F1 */
        je      text
        cmpb    $0x3c, %ah              /* F2 */
        je      again
        cmpb    $0x3f, %ah              /* F5 */
        je      likes
        movw    $0x0301, %cx
        cmpb    $0x3d, %ah              /* F3 */
        je      disk
        movb    $2, %ch
        cmpb    $0x3e, %ah              /* F4 */
        je      disk
        call    typed
        jmp     loop
2:      movw    $0x3fd, %dx
        inb     %dx, %al
        testb   $1, %al
        jz      3f
        movw    $0x3f8, %dx
        inb     %dx, %al
        call    put
        call    typed
        jmp     loop
3:      hlt                             /* until the clock, a key or the mouse */
        jmp     loop

text:   movw    $3, %ax
        int     $0x10
        jmp     loop

likes:  movw    $0x4f15, %ax            /* VBE/DDC: read EDID */
        movw    $1, %bx
        xorw    %cx, %cx
        xorw    %dx, %dx
        pushw   %dx
        pop     %es
        movw    $noted, %di
        int     $0x10
        movw    $noted+56, %si          /* of the first detailed timing */
        call    pixels
        movw    $noted+59, %si
        call    pixels
        jmp     loop

pixels: movb    2(%si), %al             /* its upper four bits */
        shrb    $4, %al
        call    put
        movb    (%si), %al
        jmp     put

disk:   movw    %cx, %ax                /* write or read one sector */
        pushw   $0
        pop     %es
        movw    $noted, %bx
        movw    $2, %cx
        movw    $0x80, %dx
        int     $0x13
        movb    noted, %al
        jnc     7f
        movb    $'!', %al
7:      call    put
        jmp     loop

typed:  movb    %al, noted
        call    put
        movw    keys, %bx
        cmpw    $30, %bx
        jae     4f
        incw    keys
        imulw   $10, %bx, %bx           /* x */
        movw    $100, %dx
        movw    $10, %cx
        movb    $3, %al
        call    square
4:      ret

moved:  pusha                           /* far, by the BIOS: its status word lies above ours and three more */
        push    %es
        push    %ds
        xorw    %bx, %bx
        movw    %bx, %ds
        movw    %sp, %bp
        movb    30(%bp), %al            /* buttons */
        andw    $3, %ax
        movw    $shown, %bx
        xlatb
        call    corner
        pop     %ds
        pop     %es
        popa
        lret

put:    pusha
        movw    $0x3fd, %dx
        xchgw   %ax, %bx
5:      inb     %dx, %al
        testb   $0x20, %al
        jz      5b
        xchgw   %ax, %bx
        movw    $0x3f8, %dx
        outb    %al, %dx
        popa
        ret

picture:
        movw    $0x13, %ax
        int     $0x10
        movw    $0x3c8, %dx
        movb    $1, %al
        outb    %al, %dx
        incw    %dx
        movw    $palette, %si
        movw    $15, %cx
        rep outsb
        pushw   $0xa000
        pop     %es
        xorw    %di, %di
        movb    $1, %al
        movw    $64000, %cx
        rep stosb
        movw    %di, keys
        movw    $0, keys
        movb    $2, %al
corner: movw    $40, %bx
        movw    $20, %dx
        movw    $20, %cx

square: pusha                           /* colour %al, at %bx,%dx, side %cx */
        pushw   $0xa000
        pop     %es
        imulw   $320, %dx, %di
        addw    %bx, %di
        movw    %cx, %dx
6:      pushw   %cx
        pushw   %di
        movw    %dx, %cx
        rep stosb
        pop     %di
        addw    $320, %di
        pop     %cx
        loop    6b
        popa
        ret

hello:  .asciz "boot\n"
shown:  .byte   2, 4, 5, 5
palette:
        .byte   63, 0, 0,  0, 63, 0,  0, 0, 63,  63, 63, 0,  63, 63, 63
        .org    508
keys:   .word   0
        .byte   0x55, 0xaa
