# Path from the entry in 32-bit protected mode (or real mode, for the other vCPUs) to ring 3 in long
# mode.
#
# All code in this file runs in ring 0, where some hypervisors emulate every instruction. The code
# is therefore short, the page tables are linked into the image instead of built, and only traps
# return to it.

.set CODE64, 0x08
.set DATA, 0x10
.set CODE32, 0x18
.set USER_DATA, 0x23
.set USER_CODE, 0x2b
.set TSS_FIRST, 0x30

.set MAX_CPUS, 64
.set USER_STACK, 16384
.set KERNEL_STACK, 512
.set TSS_BITMAP, 104
.set TSS_BYTES, TSS_BITMAP + 0x400 / 8 + 1
.set AP_START, 0x8000
.set LAPIC_ID, 0xfee00020

# Present, writable, user; accessed and dirty, so that no walk has to write them.
.set TABLE, 0x27
.set PAGE_2M, 0xe7
.set UNCACHED, 0x18

# The PVH entry note (Xen, docs/misc/pvh.pandoc): name "Xen", type 18 = XEN_ELFNOTE_PHYS32_ENTRY. The address is 64 bits wide
# as QEMU reads it.
.section .note.Xen, "a", @note
    .balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad _start

.section .boot, "ax"
.code32
.global _start
_start:
    cld
    cli
    mov dword ptr [start_info], ebx
    xor esi, esi
    jmp enter_long_mode

# Entry of the other vCPUs in protected mode, marked by esi.
ap_protected:
    mov ax, DATA
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov esi, 1

enter_long_mode:
    lgdt [gdt_pointer]
    mov eax, cr4
    or eax, 0x620           # PAE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov eax, offset pml4
    mov cr3, eax
    mov ecx, 0xc0000080     # EFER
    rdmsr
    or eax, 0x100           # LME
    wrmsr
    mov eax, 0x80010033     # PG, WP, NE, ET, MP, PE; caches on
    mov cr0, eax
    .byte 0xea              # far jump
    .long long_mode
    .word CODE64

.code64
long_mode:
    mov ax, DATA
    mov ds, ax
    mov es, ax
    mov ss, ax
    lidt [idt_pointer]
    mov eax, LAPIC_ID
    mov edi, dword ptr [rax]
    shr edi, 24
    cmp edi, MAX_CPUS
    jae dead

    # edx: this vCPU's task state segment, for the stack on traps (rsp) and for the I/O permission bitmap, which follows it and
    # permits every port below 0x400: all bits are 0. (IOPL 3 would do too, but not all hypervisors take it from iretq.)
    mov edx, edi
    shl edx, 8
    add edx, offset task_states
    lea eax, [rdi + 1]
    imul eax, eax, KERNEL_STACK
    add eax, offset kernel_stacks
    mov rsp, rax
    mov dword ptr [rdx + 4], eax
    mov word ptr [rdx + 102], TSS_BITMAP
    mov byte ptr [rdx + TSS_BYTES - 1], 0xff

    # ebx: its descriptor.
    mov ebx, edi
    shl ebx, 4
    add ebx, offset gdt + TSS_FIRST
    mov word ptr [rbx], TSS_BYTES - 1
    mov word ptr [rbx + 2], dx
    shr edx, 16
    mov byte ptr [rbx + 4], dl
    mov byte ptr [rbx + 5], 0x89
    mov byte ptr [rbx + 7], dh
    mov eax, edi
    shl eax, 4
    add eax, TSS_FIRST
    ltr ax

    # To ring 3: guest_main(apic_id, is_ap) with interrupts off and a stack as after a call.
    lea eax, [rdi + 1]
    imul eax, eax, USER_STACK
    add eax, offset user_stacks - 8
    push USER_DATA
    push rax
    push 2
    push USER_CODE
    push offset guest_main
    iretq

dead:
    cli
    hlt
    jmp dead

# Exceptions, except one, never happen in a guest that works. They end in trap_main(vector, error,
# rip, cr2) in ring 3, which reports them.
.balign 16
.global trap_stubs
trap_stubs:
.set vector, 0
.rept 32
    .balign 16
    .if (vector == 8) | (vector == 10) | (vector == 11) | (vector == 12) | (vector == 13) | (vector == 14) | (vector == 17) | (vector == 21) | (vector == 29) | (vector == 30)
    .else
    push 0
    .endif
    push vector
    .if vector == 13
    jmp general_protection
    .else
    jmp trap
    .endif
    .set vector, vector + 1
.endr

.balign 16
trap:
    pop rdi
    pop rsi
    mov rdx, qword ptr [rsp]
    mov rcx, cr2
    mov rax, qword ptr [rsp + 24]
    sub rax, 256            # beyond the red zone
    and rax, -16
    sub rax, 8
    mov qword ptr [rsp], offset trap_main
    mov qword ptr [rsp + 8], USER_CODE
    mov qword ptr [rsp + 16], 2
    mov qword ptr [rsp + 24], rax
    mov qword ptr [rsp + 32], USER_DATA
    iretq

# `hlt` in ring 3 sleeps until the next interrupt. (A gate for a software interrupt would be
# shorter, but not all hypervisors support software interrupts.)
.balign 16
general_protection:
    push rax
    mov rax, qword ptr [rsp + 24]
    cmp byte ptr [rax], 0xf4
    pop rax
    jne trap
    add rsp, 16
    add qword ptr [rsp], 1
    sti
    hlt
    cli
    iretq

# Interrupts only happen in the window above. Their only purpose is to wake the vCPU.
.global wake_stub
wake_stub:
    iretq

# Copied to AP_START, where the other vCPUs start in real mode.
.code16
.global ap_trampoline
ap_trampoline:
    cli
    cld
    xor ax, ax
    mov ds, ax
    .byte 0x66, 0x0f, 0x01, 0x16        # lgdt with a 32-bit base
    .word AP_START + ap_gdt_pointer - ap_trampoline
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    .byte 0x66, 0xea                    # far jump with a 32-bit offset
    .long ap_protected
    .word CODE32
ap_gdt_pointer:
    .word gdt_end - gdt - 1
    .long gdt
.global ap_trampoline_end
ap_trampoline_end:
.code64

.section .tables, "aw"
    .balign 4096
.global pml4
pml4:
    .quad pdpt + TABLE
    .fill 511, 8, 0
# The first 4 GiB; memory above is added by paging.rs.
.global pdpt
pdpt:
    .quad directories + TABLE
    .quad directories + 4096 + TABLE
    .quad directories + 8192 + TABLE
    .quad directories + 12288 + TABLE
    .fill 508, 8, 0
directories:
.set page, 0
.rept 2048
    .if page == 0xfee00000              # the local APIC
    .quad page + PAGE_2M + UNCACHED
    .else
    .quad page + PAGE_2M
    .endif
    .set page, page + 0x200000
.endr

    .balign 16
gdt:
    .quad 0
    .quad 0x00af9b000000ffff            # 0x08 code, 64 bits, ring 0
    .quad 0x00cf93000000ffff            # 0x10 data, ring 0
    .quad 0x00cf9b000000ffff            # 0x18 code, 32 bits, ring 0
    .quad 0x00cff3000000ffff            # 0x20 data, ring 3
    .quad 0x00affb000000ffff            # 0x28 code, 64 bits, ring 3
    .fill 2 * MAX_CPUS, 8, 0            # 0x30 task states
gdt_end:
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
    .balign 8
idt_pointer:
    .word 4095
    .quad IDT

.section .bss.boot, "aw", @nobits
    .balign 4096
kernel_stacks:
    .skip MAX_CPUS * KERNEL_STACK
    .balign 256
task_states:
    .skip MAX_CPUS * 256
    .balign 4096
user_stacks:
    .skip MAX_CPUS * USER_STACK
.global start_info
start_info:
    .skip 8
